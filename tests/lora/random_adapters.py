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

SCALE = 0.2  # large enough that texts differ from each other's and the base model's


@dataclass
class RandomAdapter:
    """`ours`: for set_adapter. `merged`: transformers' model with B A added to its weights."""

    merged: torch.nn.Module
    ours: AdapterWeights = field(default_factory=dict)


def random_adapter(model, seed: int, rank: int = 6, experts: bool = False, skip: tuple[str, ...] = ()) -> RandomAdapter:
    """For all linear layers but those whose names have a part of `skip`."""
    generator = torch.Generator().manual_seed(seed)
    adapter = RandomAdapter(copy.deepcopy(model))
    names = model_class(model.config.to_dict()).weights

    def factors(out, in_):
        a, b = (torch.randn(shape, generator=generator) * SCALE for shape in ((rank, in_), (out, rank)))
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
