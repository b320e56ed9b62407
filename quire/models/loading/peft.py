"""Adapters in PEFT's format: what their files hold, checked, as factors of a model's linear layers.

Arrays are numpy's: a torch operation in the loader's thread would start a pool of threads that compete with the steps.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.checkpoint.json_file import read_json
from quire.checkpoint.pt_file import open_pt
from quire.checkpoint.safetensors_file import open_safetensors
from quire.config.lora import MAX_LORA_RANK
from quire.config.shown import shown
from quire.config.values import whole_number
from quire.layers.load_slot import ShardId
from quire.lora.factors import Adapter, Factors, FullShape
from quire.models.loading.transforms import RowOrder
from quire.models.loading.weight_map import WeightMap

CONFIG, SAFETENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# What would change results and is not computed here, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "kasa_config": (),
    "velora_config": (),
    "monteclora_config": (),
}
# The last part may be preceded by the adapter's name in PEFT's own memory.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.\w+)?\.weight")
_EXPERTS = re.compile(r"(?:.+\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)?experts(?P<inner>\.base_layer)?")

Array = np.ndarray


@dataclass(frozen=True)
class PeftConfig:
    rank: int
    alpha: float
    rank_by_root: bool = False  # rsLoRA: the scale is alpha / sqrt(rank)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()  # fused experts that have factors

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        found = read_json(folder / CONFIG)
        if found is None:
            raise ValueError(f"{folder} has no {CONFIG}; an adapter is a folder as peft's save_pretrained writes it")
        if str(found.get("peft_type", "LORA")).upper().rpartition(".")[2] != "LORA":
            raise ValueError(f"{folder}: peft_type is {shown(found['peft_type'])}; supported: LORA")
        for name, nothing in UNSUPPORTED.items():
            value = found.get(name)
            if value is not None and value not in nothing:
                raise ValueError(f"{folder}: {name} is {shown(value)}, which is not supported; retrain without it")
        rank = whole_number(f"{CONFIG}: r", found.get("r"), 1, MAX_LORA_RANK)
        return cls(
            rank,
            _number("lora_alpha", found.get("lora_alpha", rank)),
            bool(found.get("use_rslora", False)),
            {k: whole_number("rank_pattern", v, 1, MAX_LORA_RANK) for k, v in _mapping(found, "rank_pattern").items()},
            {k: _number("alpha_pattern", v) for k, v in _mapping(found, "alpha_pattern").items()},
            tuple(map(str, found.get("target_parameters") or ())),
        )

    def scale(self, module: str) -> float:
        rank = self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_by_root else rank)


def read_adapter(path: str, full_shape: FullShape, names: WeightMap) -> Adapter:
    """`names`: of the base model's checkpoint."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path!r}; lora_path is one with {CONFIG} and {SAFETENSORS}")
    config = PeftConfig.read(folder)
    found: dict[str, dict[str, Array]] = {}
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for name, array, raw in _tensors(folder):
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{path}: {name} is none of lora_A and lora_B of a linear layer, which are supported")
        if array.ndim != 2 or 0 in array.shape:
            raise ValueError(f"{path}: {name} has the shape {list(array.shape)}; it must have two dimensions")
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} has values that are not finite")
        found.setdefault(match["module"], {})[match["which"]] = array
        digest.update(f"\0{name}\0{array.shape}\0".encode())
        digest.update(raw)
    if not found:
        raise ValueError(f"{path} holds no tensors")
    factors: dict[tuple[str, ShardId], Factors] = {}
    for module, pair in found.items():
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{path}: {module} lacks lora_{'AB'['A' in pair]}.weight")
        for key, own in _by_layer(module, pair["A"], pair["B"], config, names, full_shape):
            _check(path, module, key, own, full_shape(*key))
            factors[key] = own
    return Adapter(factors, digest.digest())


def _by_layer(
    module: str,
    a: Array,
    b: Array,
    config: PeftConfig,
    names: WeightMap,
    full_shape: FullShape,
) -> Iterator[tuple[tuple[str, ShardId], Factors]]:
    """The factors of each of our layers and shards that a module of the checkpoint is."""
    name = module.removeprefix("base_model.model.")
    b = b * np.float32(config.scale(name))
    if (experts := _EXPERTS.fullmatch(name)) is not None:
        yield from _of_fused_experts(name, experts, a, b, config, full_shape)
        return
    target = names.target(f"{name}.weight") or names.target(f"model.{name}.weight")
    layer = target.parameter.removesuffix(".weight") if target is not None else ""
    shapes = [full_shape(layer, shard) for shard in target.shards] if target is not None else []
    if target is None or not all(shapes):
        raise ValueError(
            f"{module} takes no adapter in this model: it has no such linear layer, or --lora-target-modules leaves it "
            "out"
        )
    if isinstance(target.transform, RowOrder):  # of the outputs, as the weights' rows were reordered
        b = target.transform(torch.from_numpy(b)).numpy()
    ends = np.cumsum([shape[0] for shape in shapes if shape])
    if len(shapes) > 1 and len(b) != ends[-1]:
        raise ValueError(f"{module}.lora_B has {len(b)} outputs; this model's layer has {ends[-1]}")
    for shard, rows in zip(target.shards, np.split(b, ends[:-1]), strict=True):
        yield (layer, shard), (a, rows)


def _of_fused_experts(
    name: str,
    place: re.Match[str],
    a: Array,
    b: Array,
    config: PeftConfig,
    full_shape: FullShape,
) -> Iterator[tuple[tuple[str, ShardId], Factors]]:
    """PEFT's `target_parameters`: A [experts * rank, in] and B [out, rank * experts] of all experts. Where both of a
    layer's parameters have factors, those of the first are inside the other's module."""
    parts = [part for part in ("gate_up_proj", "down_proj") if any(p.endswith(part) for p in config.parameters)]
    inner = place["inner"] is not None
    if len(parts) < 1 + inner:
        raise ValueError(f"{name}: {CONFIG} does not say in target_parameters what of the experts this belongs to")
    part = parts[0] if inner else parts[-1]
    layer = f"layers.{place['layer']}.mlp.experts.{'gate_up' if part == 'gate_up_proj' else 'down'}"
    shards: tuple[ShardId, ...] = (0, 1) if part == "gate_up_proj" else (None,)
    count = 0
    while full_shape(f"{layer}.{count}", shards[0]) is not None:
        count += 1
    if not count:
        raise ValueError(f"{name} takes no adapter: name experts among --lora-target-modules to have room for them")
    if len(a) % count or b.shape[1] != len(a):
        raise ValueError(f"{name}: A is {list(a.shape)}, B {list(b.shape)}; with {count} experts A has as many ranks")
    by_expert_a, by_expert_b = a.reshape(count, -1, a.shape[1]), b.reshape(len(b), -1, count)
    for e in range(count):
        for shard, rows in zip(shards, np.split(by_expert_b[..., e], len(shards)), strict=True):
            yield (f"{layer}.{e}", shard), (by_expert_a[e], rows)


def _check(path: str, module: str, key: tuple[str, ShardId], factors: Factors, shape: tuple[int, int] | None) -> None:
    (a, b), (name, _) = factors, key
    if shape is None:
        raise ValueError(f"{path}: {module} takes no adapter in this model ({name})")
    out, in_ = shape
    if a.shape != (len(a), in_) or b.shape != (out, len(a)):
        raise ValueError(
            f"{path}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; in this model they must be "
            f"[rank, {in_}] and [{out}, rank]: is it an adapter for another base?"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Array, bytes]]:
    """Name, values in float32, stored bytes."""
    if (folder / SAFETENSORS).is_file():
        for tensor in open_safetensors((folder / SAFETENSORS,)):
            yield tensor.name, *_wide(tensor.name, tensor.tensor())
    elif (folder / PICKLED).is_file():
        for stored in open_pt((folder / PICKLED,)):
            yield stored.name, *_wide(stored.name, stored.stored)
    else:
        raise ValueError(f"{folder} has neither {SAFETENSORS} nor {PICKLED}")


def _wide(name: str, stored: torch.Tensor) -> tuple[Array, bytes]:
    if stored.dtype == torch.bfloat16:
        halves = stored.contiguous().view(torch.int16).numpy()
        wide = (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide, halves.tobytes()
    if stored.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"{name} is {stored.dtype}; supported: float32, float16, bfloat16")
    values = stored.contiguous().numpy()
    return values.astype(np.float32), values.tobytes()


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first that matches the end of the module's name, as peft chooses."""
    return next((p for p in patterns if re.fullmatch(rf"(.*\.)?({p})", module)), "")


def _mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict) or len(value) > 10_000:
        raise ValueError(f"{CONFIG}: {name} is {shown(value)}; it must be an object of at most 10000 patterns")
    for pattern in value:
        # A pattern is a regular expression of somebody's: only the plain ones, which names of modules need.
        if not re.fullmatch(r"[\w.^$\\|()\[\]?+*-]{1,512}", pattern) or re.search(r"[*+?]\)?[*+{]", pattern):
            raise ValueError(f"{CONFIG}: {name} has the pattern {shown(pattern)}, which is not supported")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{CONFIG}: {name} has the pattern {shown(pattern)}: {error}") from None
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{CONFIG}: {name} is {shown(value)}; it must be a number")
    return float(value)
