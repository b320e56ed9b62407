"""Random adapters of tiny models, the same merged into transformers' weights, and engines whose requests name them."""

import copy
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.messages.lora import LoRARequest
from quire.messages.sampling_params import RequestOutputKind
from tests.tiny_models import greedy, prompts, save_tiny

COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = prompts((5, 17, 33, 50, 100, 1, 64, 16))
LORA_IDS = [1, 0, 2, 3, 1, 2, 0, 3]


@dataclass
class RandomAdapter:
    """`tensors`: as peft names them. `merged`: transformers' model with B A added to its weights."""

    merged: torch.nn.Module
    rank: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, folder: Path, **config: Any) -> Path:
        """As peft's save_pretrained writes it."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "bias": "none", **config}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return folder


def random_adapter(model, seed: int, rank: int = 6, experts: bool = False, skip: tuple[str, ...] = ()) -> RandomAdapter:
    """For all linear layers but those whose names have a part of `skip`. As large as the weights: texts differ."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.7 * (model.config.initializer_range / rank**0.5) ** 0.5
    adapter = RandomAdapter(copy.deepcopy(model), rank)

    def add(module, part):
        a, b = (torch.randn(size, generator=generator) * scale for size in ((rank, part.shape[1]), (len(part), rank)))
        adapter.tensors[f"base_model.model.{module}.lora_A.weight"] = a
        adapter.tensors[f"base_model.model.{module}.lora_B.weight"] = b
        part += b @ a

    for name, weight in adapter.merged.named_parameters():
        if ".layers." not in name or "norm" in name or name.endswith("bias") or any(part in name for part in skip):
            continue
        if weight.dim() == 2:
            add(name.removesuffix(".weight"), weight.data)
        elif experts:  # of all experts in one: gate_up_proj [E, 2 * I, H] and down_proj [E, H, I]
            place = name.rpartition(".")[0]
            for e, of_expert in enumerate(weight.data):
                if name.endswith("gate_up_proj"):
                    for member, part in zip(("gate_proj", "up_proj"), of_expert.chunk(2), strict=True):
                        add(f"{place}.{e}.{member}", part)
                else:
                    add(f"{place}.{e}.down_proj", of_expert)
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
        self.paths = [adapter.save(folder / f"adapter{i + 1}") for i, adapter in enumerate(self.adapters)]
        self.texts = [
            greedy(self.models[lora_id], prompt, COUNT)[0] for prompt, lora_id in zip(PROMPTS, LORA_IDS, strict=True)
        ]

    def engine(self, **arguments):
        return engine_with(self.path, self.experts, **arguments)

    def lora(self, number):
        """The request for adapter `number`; 0: none."""
        return LoRARequest(f"adapter{number}", number, str(self.paths[number - 1])) if number else None

    def complete(self, engine, prompts, numbers, params):
        return complete(engine, prompts, [self.lora(number) for number in numbers], params)

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
def engine_with(path, experts=False, **arguments):
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, **arguments}
    adapters = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    if experts:
        every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate", "experts")
        adapters["lora_target_modules"] = every
    config = EngineConfig.from_kwargs(model=str(path), skip_tokenizer_init=True, **(adapters | settings))
    engine = LLMEngine(config)
    try:
        yield engine
    finally:
        engine.shutdown()


def executor(engine):
    return engine.client.core.executor


def runner(engine):
    return executor(engine).worker.runner


def start(engine, name, prompt, lora, params):
    params = params.replace_unchecked(output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=lora)


def finish(engine):
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    return done


def complete(engine, prompts, loras, params):
    """Outputs of prompts with these adapters, all at the same time; `params`: one, or one for each."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for i, (prompt, lora, one) in enumerate(zip(prompts, loras, many, strict=True)):
        start(engine, str(i), prompt, lora, one)
    done = finish(engine)
    return [done[str(i)] for i in range(len(prompts))]


def texts(outputs):
    return [list(one.outputs[0].token_ids) for one in outputs]
