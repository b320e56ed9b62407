"""Adapters in PEFT's format: what their files hold, checked, as factors of a model's linear layers.

Arrays are numpy's: a torch operation in the loader's thread would start a pool of threads that compete with the steps.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.checkpoint.json_file import read_json
from quire.checkpoint.pt_file import open_pt
from quire.checkpoint.safetensors_file import SafetensorsTensor, read_entries
from quire.config.lora import MAX_LORA_RANK
from quire.config.shown import shown
from quire.config.values import whole_number
from quire.layers.load_slot import ShardId
from quire.lora.factors import Adapter, Factors, FullShape
from quire.models.loading.transforms import RowOrder
from quire.models.loading.weight_map import WeightNames

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
# Those that change the base's weights too: without the changed ones an adapter is not what was trained.
INITS_OF_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
MAX_NAME, MAX_ALPHA = 512, 1e300
VOCABULARY = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out")
# The last part may be preceded by the adapter's name in PEFT's own memory.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:(?P<linear>[AB])(\.\w+)?\.weight|embedding_(?P<embedding>[AB])(\.\w+)?)")
# The base's own, which peft saves with factors of an embedding or a head, changed or not.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
_EXPERTS = re.compile(r"(?:[\w.]{1,64}\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)?experts(?P<inner>\.base_layer)?")

Array = np.ndarray
PREFIX = "base_model.model."


@dataclass(frozen=True)
class PeftConfig:
    rank: int
    alpha: float
    rank_by_root: bool = False  # rsLoRA: the scale is alpha / sqrt(rank)
    rank_pattern: Mapping[re.Pattern[str], int] = field(default_factory=dict)
    alpha_pattern: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()  # fused experts that have factors
    ties: bool = False  # a tied head has the embedding's factors, or the embedding the head's

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
        init = found.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(INITS_OF_BASE):
            raise ValueError(
                f"{folder}: init_lora_weights is {shown(init)}, which changes the base too; save it as a plain adapter "
                "(save_pretrained's path_initial_model_for_weight_conversion)"
            )
        rank = whole_number(f"{CONFIG}: r", found.get("r"), 1, MAX_LORA_RANK)
        return cls(
            rank,
            _number("lora_alpha", found.get("lora_alpha", rank)),
            _switch("use_rslora", found.get("use_rslora")),
            {k: whole_number("rank_pattern", v, 1, MAX_LORA_RANK) for k, v in _patterns(found, "rank_pattern").items()},
            {k: _number("alpha_pattern", v) for k, v in _patterns(found, "alpha_pattern").items()},
            _names("target_parameters", found.get("target_parameters")),
            _switch("ensure_weight_tying", found.get("ensure_weight_tying")),
        )

    def of(self, module: str) -> tuple[int, float]:
        """Its rank and scale: those of the first pattern that matches the end of its name, as peft chooses."""
        rank = next((rank for p, rank in self.rank_pattern.items() if p.fullmatch(module)), self.rank)
        alpha = next((alpha for p, alpha in self.alpha_pattern.items() if p.fullmatch(module)), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rank_by_root else rank)


def read_adapter(
    path: str,
    full_shape: FullShape,
    names: WeightNames,
    elsewhere: Callable[[str], bool] = lambda name: False,
) -> Adapter:
    """`names`: of the base model's checkpoint. `elsewhere`: whether another worker has what a tensor of it is for."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path!r}; lora_path is one with {CONFIG} and {SAFETENSORS}")
    config = PeftConfig.read(folder)
    found: dict[str, dict[str, Array]] = {}
    bases: dict[str, tuple[int, ...]] = {}
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for name, array, raw in _tensors(folder):
        match = _FACTOR.fullmatch(name) if len(name) <= MAX_NAME else None
        if match is None and (base := _BASE.fullmatch(name[:MAX_NAME])) is not None:
            bases[base["module"]] = array.shape
            continue
        if match is None:
            raise ValueError(
                f"{path}: {name[:MAX_NAME]} is none of lora_A and lora_B of a linear layer, which are supported"
            )
        if array.ndim != 2 or 0 in array.shape:
            raise ValueError(f"{path}: {name} has the shape {list(array.shape)}; it must have two dimensions")
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} has values that are not finite")
        pair, which = found.setdefault(match["module"], {}), match["linear"] or match["embedding"]
        if which in pair:
            raise ValueError(f"{path}: {match['module']} has lora_{which} twice; it must be one adapter")
        pair[which] = array
        digest.update(f"\0{name}\0{array.shape}\0".encode())
        digest.update(raw)
    if not found:
        raise ValueError(f"{path} holds no tensors")
    factors: dict[tuple[str, ShardId], Factors] = {}
    for module, pair in found.items():
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{path}: {module} lacks lora_{'AB'['A' in pair]}.weight")
        if config.ties and module.rpartition(".")[2] in VOCABULARY:
            raise ValueError(f"{path}: ensure_weight_tying with {module} is not supported; retrain without it")
        if elsewhere(f"{module.removeprefix(PREFIX)}.weight"):
            continue
        for key, own in _by_layer(module, pair["A"], pair["B"], config, names, full_shape):
            _check_base(path, module, bases.get(module), full_shape(*key))
            _check(path, module, key, own, full_shape(*key))
            if key in factors:
                raise ValueError(f"{path}: {module} is a layer that another of its modules is too")
            factors[key] = own
    return Adapter(factors, digest.digest())


def _by_layer(
    module: str,
    a: Array,
    b: Array,
    config: PeftConfig,
    names: WeightNames,
    full_shape: FullShape,
) -> Iterator[tuple[tuple[str, ShardId], Factors]]:
    """The factors of each of our layers and shards that a module of the checkpoint is."""
    name = module.removeprefix(PREFIX)
    if (experts := _EXPERTS.fullmatch(name)) is not None:
        yield from _of_fused_experts(name, experts, a, b, config, names, full_shape)
        return
    target = names.target(f"{name}.weight") or names.target(f"model.{name}.weight")
    layer = target.parameter.removesuffix(".weight") if target is not None else ""
    shapes = [full_shape(layer, shard) for shard in target.shards] if target is not None else []
    if target is None or not all(shapes):
        raise ValueError(
            f"{module} takes no adapter in this model: it has no such layer, or --lora-target-modules leaves it out "
            f"(it takes one if {name.rpartition('.')[2]} is among them)"
        )
    b = _scaled(name, len(a), b, config)
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
    names: WeightNames,
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
    parameter = f"{name.removesuffix('.base_layer')}.{part}"
    b = _scaled(parameter, len(a) // count, b, config)
    stored = names.target(parameter) or names.target(f"model.{parameter}")
    if part == "gate_up_proj" and stored is not None and stored.transform is not None:
        # Of [experts, inputs, outputs] with outputs in another order than ours: gpt-oss has gate and up in turns.
        b = stored.transform(torch.from_numpy(b.T[None]))[0].numpy()
    by_expert_a, by_expert_b = a.reshape(count, -1, a.shape[1]), b.reshape(len(b), -1, count)
    for e in range(count):
        for shard, rows in zip(shards, np.split(by_expert_b[..., e], len(shards)), strict=True):
            yield (f"{layer}.{e}", shard), (by_expert_a[e], rows)


def _scaled(module: str, rank: int, b: Array, config: PeftConfig) -> Array:
    said, scale = config.of(module)
    if rank != said:
        raise ValueError(f"{module} has factors of rank {rank}; {CONFIG} says {said}")
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: Array = b * np.float32(scale)
    if not np.isfinite(scaled).all():
        raise ValueError(f"{module} has values that are not finite once scaled by {scale:g}")
    return scaled


def _check_base(path: str, module: str, shape: tuple[int, ...] | None, full: tuple[int, int] | None) -> None:
    if shape is not None and full is not None and sorted(shape) != sorted(full):
        raise ValueError(
            f"{path}: the base's {module} was {list(shape)} in training; here it has {max(full)} tokens: an adapter "
            "with tokens of its own is not supported"
        )


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
        entries = read_entries(folder / SAFETENSORS)
        # Not mapped into memory: if the file is cut short meanwhile, as by a trainer that saves anew, the process ends.
        data = torch.frombuffer(bytearray((folder / SAFETENSORS).read_bytes()), dtype=torch.uint8)
        for tensor in (SafetensorsTensor(entry, data) for entry in entries):
            yield tensor.name, *_wide(tensor.name, tensor.tensor())
    elif (folder / PICKLED).is_file():
        size = (folder / PICKLED).stat().st_size
        for stored in open_pt((folder / PICKLED,)):
            if stored.stored.nbytes > size:  # one number, seen as many
                raise ValueError(f"{folder}: {stored.name} is larger than {PICKLED}")
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


def _patterns(config: Mapping[str, Any], name: str) -> dict[re.Pattern[str], Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict) or len(value) > 10_000:
        raise ValueError(f"{CONFIG}: {name} is {shown(value)}; it must be an object of at most 10000 patterns")
    found = {}
    for pattern, own in value.items():
        if not _is_plain(pattern):
            raise ValueError(f"{CONFIG}: {name} has the pattern {shown(pattern)}, which is not supported")
        try:
            found[re.compile(rf"(.*\.)?({pattern})")] = own
        except re.error as error:
            raise ValueError(f"{CONFIG}: {name} has the pattern {shown(pattern)}: {error}") from None
    return found


def _is_plain(pattern: str) -> bool:
    """A pattern is a regular expression of somebody's: only those that names of modules need, none that takes long."""
    return (
        re.fullmatch(r"[\w.^$\\|()\[\]?+*-]{1,512}", pattern) is not None
        and not re.search(r"\)[*+]|[*+?][*+]", pattern)
        and len(re.findall(r"[*+?]", pattern)) <= 3
        and pattern.count("(") <= 3
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise ValueError(f"{CONFIG}: {name} is {shown(value)}; it must be a number of at most {MAX_ALPHA:g}")
    return float(value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise ValueError(f"{CONFIG}: {name} is {shown(value)}; it must be true or false")
    return bool(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | None) or not all(isinstance(one, str) for one in value or ()):
        raise ValueError(f"{CONFIG}: {name} is {shown(value)}; it must be a list of names")
    return tuple(value or ())
