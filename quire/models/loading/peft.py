"""Adapters in PEFT's format: what their files hold, checked, as factors of a model's linear layers."""

import functools
import hashlib
import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.checkpoint.hashed import read_hashed
from quire.checkpoint.json_file import is_readable, parse_object
from quire.checkpoint.pt_file import open_pt
from quire.checkpoint.safetensors_file import DTYPES, read_entries
from quire.checkpoint.tensors import pool_of
from quire.config.lora import MAX_LORA_RANK
from quire.config.shown import shown
from quire.config.values import whole_number
from quire.layers.load_slot import ShardId
from quire.lora.factors import INFINITY, Adapter, Factors, FullShape, NewMemory, are_finite, scaled
from quire.messages.lora import CONFIG, PICKLED, SAFETENSORS
from quire.models.loading.transforms import RowOrder
from quire.models.loading.weight_map import WeightNames
from quire.platforms.cpu_cores import usable_cores
from quire.platforms.cpu_facts import available_memory

logger = logging.getLogger("quire")

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
MAX_NAME, MAX_ALPHA, MAX_CONFIG_BYTES = 512, 1e300, 16 << 20
VOCABULARY = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out")
# The last part may be preceded by the adapter's name in PEFT's own memory.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:(?P<linear>[AB])(\.\w+)?\.weight|embedding_(?P<embedding>[AB])(\.\w+)?)")
# The base's own, which peft saves with factors of an embedding or a head, changed or not.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
_EXPERTS = re.compile(r"(?:[\w.]{1,64}\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)?experts(?P<inner>\.base_layer)?")

Array = np.ndarray
PREFIX = "base_model.model."
BATCH = 32  # modules that a thread takes at once
MOST_UNSEEN = 1 << 28  # bytes of a file that are read while its header is: of a larger one the header comes first
MOST_SEEN = 2  # times that a pickled number may be in tensors: an embedding's copy is the head's too
# Threads at most, and cores for each: few where steps compute on the same cores.
THREADS, THREADS_BESIDE_STEPS = (8, 2), (4, 4)


@dataclass(frozen=True)
class Stored:
    """A tensor of an adapter, in memory that may be changed."""

    name: str
    dtype: torch.dtype
    bits: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


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
    def read(cls, folder: Path, digest: "hashlib._Hash") -> "PeftConfig":
        """And hash what was read."""
        if not is_readable(folder / CONFIG):
            raise ValueError(f"{folder} has no {CONFIG}; an adapter is a folder as peft's save_pretrained writes it")
        if (size := (folder / CONFIG).stat().st_size) > MAX_CONFIG_BYTES:  # steps wait for the parser
            raise ValueError(f"{folder / CONFIG} has {size} bytes; at most {MAX_CONFIG_BYTES} are read")
        content = (folder / CONFIG).read_bytes()
        digest.update(content)
        found = parse_object(content, f"{folder / CONFIG}")
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
    memory: NewMemory,
    names: WeightNames,
    dtype: torch.dtype,
    elsewhere: Callable[[str], bool] = lambda name: False,
    beside_steps: bool = True,
) -> Adapter:
    """`memory`: for its file. `names`: of the base model's checkpoint. `dtype`: of the slots. `elsewhere`: whether
    another worker has what a tensor of it is for. `beside_steps`: which compute on the same cores."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path!r}; lora_path is one with {CONFIG} and {SAFETENSORS}")
    digest, began, threads = hashlib.sha256(), time.perf_counter(), _num_threads(beside_steps)
    config = PeftConfig.read(folder, digest)
    with pool_of(threads, "quire-adapter") as pool:
        tensors, hashes = _tensors(folder, pool, memory)
        hashed = time.perf_counter()
        for tensor in tensors:
            digest.update(f"\0{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(b"".join(hashes))
        found, bases = _pairs(path, tensors)

        def read(modules: Sequence[str]) -> list[tuple[str, tuple[str, ShardId], Factors]]:
            own = []
            for module in modules:
                pair = _checked_pair(path, module, found[module], config)
                if elsewhere(f"{module.removeprefix(PREFIX)}.weight"):
                    continue
                a = scaled(pair["A"].bits, pair["A"].dtype, 1, dtype)
                for key, factors in _by_layer(module, a, pair["B"], config, names, full_shape, dtype):
                    _check_base(path, module, bases.get(module), full_shape(*key))
                    _check(path, module, key, factors, full_shape(*key))
                    own.append((module, key, factors))
            return own

        modules = list(found)
        batches = [modules[i : i + BATCH] for i in range(0, len(modules), BATCH)]
        factors: dict[tuple[str, ShardId], Factors] = {}
        for module, key, own in itertools.chain.from_iterable(pool.map(read, batches)):
            if key in factors:
                raise ValueError(f"{path}: {module} is a layer that another of its modules is too")
            factors[key] = own
    told = (path, 1e3 * (hashed - began), 1e3 * (time.perf_counter() - hashed), threads)
    logger.debug("%s: read and hashed in %.1f ms, checked in %.1f ms, by %d threads", *told)
    return Adapter(factors, digest.digest())


@functools.cache
def _num_threads(beside_steps: bool) -> int:
    most, cores = THREADS_BESIDE_STEPS if beside_steps else THREADS
    return min(most, usable_cores() // cores)


def _pairs(path: str, tensors: Sequence[Stored]) -> tuple[dict[str, dict[str, Stored]], dict[str, tuple[int, ...]]]:
    """A and B by module, and shapes of the base's own weights."""
    found: dict[str, dict[str, Stored]] = {}
    bases: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        name = tensor.name
        match = _FACTOR.fullmatch(name) if len(name) <= MAX_NAME else None
        if match is None and (base := _BASE.fullmatch(name[:MAX_NAME])) is not None:
            bases[base["module"]] = tensor.shape
            continue
        if match is None:
            raise ValueError(
                f"{path}: {name[:MAX_NAME]} is none of lora_A and lora_B of a linear layer, which are supported"
            )
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ValueError(f"{path}: {name} has the shape {list(tensor.shape)}; it must have two dimensions")
        pair, which = found.setdefault(match["module"], {}), match["linear"] or match["embedding"]
        if which in pair:
            raise ValueError(f"{path}: {match['module']} has lora_{which} twice; it must be one adapter")
        pair[which] = tensor
    if not found:
        raise ValueError(f"{path} holds no tensors")
    return found, bases


def _checked_pair(path: str, module: str, pair: dict[str, Stored], config: PeftConfig) -> dict[str, Stored]:
    if pair.keys() != {"A", "B"}:
        raise ValueError(f"{path}: {module} lacks lora_{'AB'['A' in pair]}.weight")
    if config.ties and module.rpartition(".")[2] in VOCABULARY:
        raise ValueError(f"{path}: ensure_weight_tying with {module} is not supported; retrain without it")
    for tensor in pair.values():
        if not are_finite(tensor.bits, tensor.dtype):
            raise ValueError(f"{path}: {tensor.name} has values that are not finite")
    return pair


def _by_layer(
    module: str,
    a: Array,
    b: Stored,
    config: PeftConfig,
    names: WeightNames,
    full_shape: FullShape,
    dtype: torch.dtype,
) -> Iterator[tuple[tuple[str, ShardId], Factors]]:
    """The factors of each of our layers and shards that a module of the checkpoint is."""
    name = module.removeprefix(PREFIX)
    if (experts := _EXPERTS.fullmatch(name)) is not None:
        yield from _of_fused_experts(name, experts, a, b, config, names, full_shape, dtype)
        return
    target = names.target(f"{name}.weight") or names.target(f"model.{name}.weight")
    layer = target.parameter.removesuffix(".weight") if target is not None else ""
    shapes = [full_shape(layer, shard) for shard in target.shards] if target is not None else []
    if target is None or not all(shapes):
        raise ValueError(
            f"{module} takes no adapter in this model: it has no such layer, or --lora-target-modules leaves it out "
            f"(it takes one if {name.rpartition('.')[2]} is among them)"
        )
    of_all = _scaled(name, len(a), b, config, dtype)
    if isinstance(target.transform, RowOrder):  # of the outputs, as the weights' rows were reordered
        of_all = of_all[target.transform(torch.arange(len(of_all))).numpy()]
    ends = np.cumsum([shape[0] for shape in shapes if shape])
    if len(shapes) > 1 and len(of_all) != ends[-1]:
        raise ValueError(f"{module}.lora_B has {len(of_all)} outputs; this model's layer has {ends[-1]}")
    for shard, rows in zip(target.shards, np.split(of_all, ends[:-1]), strict=True):
        yield (layer, shard), (a, rows)


def _of_fused_experts(
    name: str,
    place: re.Match[str],
    a: Array,
    b: Stored,
    config: PeftConfig,
    names: WeightNames,
    full_shape: FullShape,
    dtype: torch.dtype,
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
    of_all = _scaled(parameter, len(a) // count, b, config, dtype)
    stored = names.target(parameter) or names.target(f"model.{parameter}")
    if part == "gate_up_proj" and stored is not None and stored.transform is not None:
        # Of [experts, inputs, outputs] with outputs in another order than ours: gpt-oss has gate and up in turns.
        of_all = stored.transform(torch.from_numpy(of_all.T[None]))[0].numpy()
    by_expert_a, by_expert_b = a.reshape(count, -1, a.shape[1]), of_all.reshape(len(of_all), -1, count)
    for e in range(count):
        for shard, rows in zip(shards, np.split(by_expert_b[..., e], len(shards)), strict=True):
            yield (f"{layer}.{e}", shard), (by_expert_a[e], rows)


def _scaled(module: str, rank: int, b: Stored, config: PeftConfig, dtype: torch.dtype) -> Array:
    said, scale = config.of(module)
    if rank != said:
        raise ValueError(f"{module} has factors of rank {rank}; {CONFIG} says {said}")
    try:
        return scaled(b.bits, b.dtype, scale, dtype)
    except OverflowError:
        raise ValueError(f"{module} has values that are not finite once scaled by {scale:g}") from None


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


def _tensors(folder: Path, pool: Executor, memory: NewMemory) -> tuple[list[Stored], list[bytes]]:
    """And hashes of all that is stored."""
    if (folder / SAFETENSORS).is_file():
        size = _checked_size(folder / SAFETENSORS)
        listed = pool.submit(read_entries, folder / SAFETENSORS)  # hundreds of names, read beside the rest
        if size > MOST_UNSEEN and max((entry.stop for entry in listed.result()), default=0) < size:
            raise ValueError(f"{folder / SAFETENSORS} has {size} bytes, more than its tensors")
        data, hashes = read_hashed(folder / SAFETENSORS, pool, memory)
        entries = listed.result()
        # The header may be of before a trainer saved anew: what is hashed is what tensors are taken from where.
        hashes.append(hashlib.sha256(str([(entry.start, entry.stop) for entry in entries]).encode()).digest())
        types = [getattr(torch, DTYPES[entry.dtype][0]) for entry in entries]
        return [
            _stored(entry.name, dtype, entry.shape, data[entry.start : entry.stop])
            for entry, dtype in zip(entries, types, strict=True)
        ], hashes
    if (folder / PICKLED).is_file():
        size, seen = _checked_size(folder / PICKLED), 0
        tensors = []
        for one in open_pt((folder / PICKLED,), copies=True):
            seen += one.nbytes
            if seen > MOST_SEEN * size:  # the same numbers, as many tensors
                raise ValueError(f"{folder}: up to {one.name} the tensors are larger than {PICKLED}")
            data = one.stored.contiguous().flatten().view(torch.uint8).numpy().copy()
            tensors.append(_stored(one.name, one.stored.dtype, one.shape, data))
        return tensors, [hashlib.sha256(tensor.bits.data).digest() for tensor in tensors]
    raise ValueError(f"{folder} has neither {SAFETENSORS} nor {PICKLED}")


def _checked_size(file: Path) -> int:
    size = file.stat().st_size
    if size > MOST_UNSEEN:
        with suppress(RuntimeError):  # it is not known
            if size > (available := available_memory()):
                raise ValueError(f"{file} has {size} bytes; {available} are free in memory")
    return size


def _stored(name: str, dtype: torch.dtype, shape: tuple[int, ...], data: Array) -> Stored:
    if dtype not in INFINITY:
        raise ValueError(f"{name} is {dtype}; supported: float32, float16, bfloat16")
    bits = data.view(f"i{dtype.itemsize}")
    return Stored(name, dtype, (bits if bits.flags.aligned else bits.copy()).reshape(shape))


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
