"""Random adapters of tiny models, the same merged into transformers' weights, and engines whose requests name them."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from quire import SamplingParams
from quire.config import EngineConfig
from quire.config.lora import LoRAConfig
from quire.engine.llm_engine import LLMEngine
from quire.lora.adapters import AdapterWeights
from quire.messages.sampling_params import RequestOutputKind
from quire.models.registry import model_class
from tests.tiny_models import greedy, prompts, save_tiny

COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = prompts((5, 17, 33, 50, 100, 1, 64, 16))
LORA_IDS = [1, 0, 2, 3, 1, 2, 0, 3]


@dataclass
class RandomAdapter:
    """`ours`: for set_adapter. `merged`: transformers' model with B A added to its weights."""

    merged: torch.nn.Module
    ours: AdapterWeights = field(default_factory=dict)


def random_adapter(model, seed: int, rank: int = 6, experts: bool = False, skip: tuple[str, ...] = ()) -> RandomAdapter:
    """For all linear layers but those whose names have a part of `skip`. As large as the weights: texts differ."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.7 * (model.config.initializer_range / rank**0.5) ** 0.5
    adapter = RandomAdapter(copy.deepcopy(model))
    names = model_class(model.config.to_dict()).weights

    def factors(out, in_):
        a, b = (torch.randn(shape, generator=generator) * scale for shape in ((rank, in_), (out, rank)))
        return a, b

    for name, weight in adapter.merged.named_parameters():
        if ".layers." not in name or "norm" in name or name.endswith("bias") or any(part in name for part in skip):
            continue
        if weight.dim() == 2:
            a, b = factors(*weight.shape)
            target = names.target(name)
            key = (target.parameter.removesuffix(".weight"), target.shards[0])
            adapter.ours[key] = (a, b)
            weight.data += b @ a
        elif experts:  # of all experts in one: gate_up_proj [E, 2 * I, H] and down_proj [E, H, I]
            place = f"layers.{name.split('.')[2]}.mlp.experts"
            for e, of_expert in enumerate(weight.data):
                fused = name.endswith("gate_up_proj")
                for i, part in enumerate(of_expert.chunk(2) if fused else [of_expert]):
                    a, b = factors(*part.shape)
                    adapter.ours[(f"{place}.gate_up.{e}", i) if fused else (f"{place}.down.{e}", None)] = (a, b)
                    part += b @ a
    return adapter


class Case:
    """A tiny model, three adapters (of different ranks, and not all for all layers), and the texts that are right."""

    def __init__(self, family, folder, experts=False, **overrides):
        self.path, self.experts = folder, experts
        model = save_tiny(family, folder, **overrides)
        self.adapters = [
            random_adapter(model, 1, experts=experts),
            random_adapter(model, 2, rank=8, experts=experts, skip=("k_proj", "layers.1.")),
            random_adapter(model, 3, rank=1, experts=experts, skip=("up_proj", "o_proj")),
        ]
        self.models = [model, *(adapter.merged for adapter in self.adapters)]
        self.texts = [
            greedy(self.models[lora_id], prompt, COUNT)[0] for prompt, lora_id in zip(PROMPTS, LORA_IDS, strict=True)
        ]

    def engine(self, **arguments):
        return engine_with(self.path, self.adapters, self.experts, **arguments)

    def worst_error(self, outputs, prompts, lora_ids):
        """Greatest mean difference of the logprobs of an output's tokens from what the merged model gives to them."""
        return max(self._error(*one) for one in zip(outputs, prompts, lora_ids, strict=True))

    @torch.no_grad()
    def _error(self, output, prompt, lora_id):
        tokens = list(output.outputs[0].token_ids)
        ours = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        logits = self.models[lora_id](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1)[range(len(tokens)), tokens]
        return (theirs - torch.tensor(ours)).abs().mean().item()


@contextmanager
def engine_with(path, adapters, experts=False, max_loras=None, **arguments):
    """Adapter i of the list is lora_id i + 1; none: an engine without capacity for any."""
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, **arguments}
    lora = LoRAConfig(bool(adapters), max_loras or max(1, len(adapters)), 8, adapt_experts=experts)
    config = EngineConfig.from_kwargs(model=str(path), skip_tokenizer_init=True, **settings).replace(lora=lora)
    engine = LLMEngine(config)
    try:
        for i, adapter in enumerate(adapters):
            executor(engine).set_adapter(i + 1, adapter.ours)
        yield engine
    finally:
        engine.shutdown()


def executor(engine):
    return engine.client.core.executor


def runner(engine):
    return executor(engine).worker.runner


def start(engine, name, prompt, lora_id, params):
    params = params.replace_unchecked(output_kind=RequestOutputKind.FINAL_ONLY)
    parsed, request = engine.input_processor.process(name, {"prompt_token_ids": prompt}, params)
    request.lora_id = lora_id
    engine.output_processor.add(name, parsed.text, parsed.token_ids, request)
    engine.client.add_request(request)


def finish(engine):
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    return done


def complete(engine, prompts, lora_ids, params):
    """Outputs of prompts with these adapters, all at the same time; `params`: one, or one for each."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for i, (prompt, lora_id, one) in enumerate(zip(prompts, lora_ids, many, strict=True)):
        start(engine, str(i), prompt, lora_id, one)
    done = finish(engine)
    return [done[str(i)] for i in range(len(prompts))]


def texts(outputs):
    return [list(one.outputs[0].token_ids) for one in outputs]
