"""The registry of attention backends: which serves each KV-cache group, and why."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.attention.base import CacheBackend, GroupFeatures
from quire.attention.indexed import TorchIndexedBackend
from quire.attention.latent import TorchLatentBackend
from quire.attention.latent_native import NativeLatentBackend
from quire.attention.native import NativeBackend
from quire.attention.simple_pages import needs_simple_pages
from quire.attention.torch import TorchBackend
from quire.config.vllm.choices import to_come
from quire.messages.kv_cache import FullAttentionSpec, KVCacheSpec, LatentSpec, SlidingWindowSpec
from quire.platforms.base import Platform

MAX_TRITON_HEAD_SIZE, MAX_TRITON_GROUP = 256, 128  # more would not fit the registers of a program
MAX_TRITON_LATENT = (512, 64)  # compressed and rotated: with more, a tile would not fit shared memory
MAX_TRITON_ROWS = 65_535  # of a dimension of the launch grid


class TritonEntry(CacheBackend):
    """Stands for TritonBackend in the registry: that module imports Triton, which is there only with a GPU."""

    name = "triton"
    kinds = (FullAttentionSpec, SlidingWindowSpec)

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        if not platform.supports_triton:
            return "a GPU"
        most = (max(s.head_size for s in features.shapes), max(s.group for s in features.shapes))
        if most[0] > MAX_TRITON_HEAD_SIZE or most[1] > MAX_TRITON_GROUP:
            return (
                f"smaller heads than {most[0]} with {most[1]} to a KV head: the most are {MAX_TRITON_HEAD_SIZE} and "
                f"{MAX_TRITON_GROUP}"
            )
        if features.max_rows > MAX_TRITON_ROWS:
            return f"fewer rows: max_num_seqs is {features.max_rows}; on a GPU at most {MAX_TRITON_ROWS} are allowed " \
                "(--max-num-seqs)"  # fmt: skip
        return needs_simple_pages(dtype, spec, features, quantized=("float8_e4m3fn", "int8"))

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> CacheBackend:
        backend: type[CacheBackend] = importlib.import_module("quire.attention.triton").TritonBackend
        return backend.create(platform, dtype, features)


class InvariantEntry(TritonEntry):
    """Stands for InvariantBackend, likewise."""

    name = "triton_invariant"

    @classmethod
    def declines(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> str | None:
        return "it is that of --batch-invariant"

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> CacheBackend:
        backend: type[CacheBackend] = importlib.import_module("quire.attention.invariant").InvariantBackend
        return backend.create(platform, dtype, features)


class TritonLatentEntry(CacheBackend):
    """Stands for TritonLatentBackend, likewise."""

    name = "triton_mla"
    kinds = (LatentSpec,)

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        if not platform.supports_triton:
            return "a GPU"
        assert isinstance(spec, LatentSpec)
        if spec.index_size:
            return "a cache without keys of an index"
        if spec.rank > MAX_TRITON_LATENT[0] or spec.rope_size > MAX_TRITON_LATENT[1]:
            return "latents of at most {} + {}, not {} + {}".format(*MAX_TRITON_LATENT, spec.rank, spec.rope_size)
        if not features.causal:
            return "causal attention"
        if features.max_rows > MAX_TRITON_ROWS:
            return f"fewer rows than {features.max_rows}: at most {MAX_TRITON_ROWS} (--max-num-seqs)"
        return None

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> CacheBackend:
        backend: type[CacheBackend] = importlib.import_module("quire.attention.latent_triton").TritonLatentBackend
        return backend.create(platform, dtype, features)


# In order of preference.
BACKENDS: list[type[CacheBackend]] = [
    TritonEntry,
    NativeBackend,
    TorchBackend,
    TritonLatentEntry,
    NativeLatentBackend,
    TorchLatentBackend,
    TorchIndexedBackend,
    InvariantEntry,
]


def register_backend(backend: type[CacheBackend], first: bool = True) -> None:
    """Serve groups with a backend of one's own: preferred to all others, or only where no other serves."""
    BACKENDS.insert(0 if first else len(BACKENDS), backend)


@dataclass(frozen=True)
class BackendChoice:
    """The backend of each group, and one sentence that says why for each."""

    by_group: list[CacheBackend]
    reasons: list[str]


def choose_backends(
    platform: Platform,
    dtype: torch.dtype,
    groups: Sequence[tuple[KVCacheSpec, GroupFeatures]],
    requested: str | None = None,
) -> BackendChoice:
    """Groups with the same choice share the backend. `requested` is for the kinds of cache that it knows."""
    names = [backend.name for backend in BACKENDS]
    if requested is not None and requested not in names:
        later = to_come("attention_backend", requested.upper())
        raise ValueError(f"{later}unknown attention backend {requested!r}; allowed: {', '.join(names)}")
    chosen = [_choose(platform, dtype, spec, features, requested) for spec, features in groups]
    made: dict[type[CacheBackend], CacheBackend] = {}
    for kind in dict.fromkeys(kind for kind, _ in chosen):
        served = [features for (one, _), (_, features) in zip(chosen, groups, strict=True) if one is kind]
        shapes = tuple(shape for features in served for shape in features.shapes)
        made[kind] = kind.create(platform, dtype, replace(served[0], shapes=shapes))
    return BackendChoice([made[kind] for kind, _ in chosen], list(dict.fromkeys(why for _, why in chosen)))


def _choose(
    platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures, requested: str | None
) -> tuple[type[CacheBackend], str]:
    needs: dict[str, str] = {}
    found: list[type[CacheBackend]] = []
    declined: dict[str, str] = {}
    for backend in BACKENDS:
        knows = isinstance(spec, backend.kinds)
        lacking = backend.supports(platform, dtype, spec, features) if knows else _kinds(backend)
        if lacking is not None:
            needs[backend.name] = lacking
        elif requested == backend.name:
            return backend, f"attention backend {backend.name}: it was requested."
        else:
            reason = backend.declines(platform, dtype, features)
            found.append(backend)
            if reason is not None:
                declined[backend.name] = reason
    asked = any(isinstance(spec, backend.kinds) for backend in BACKENDS if backend.name == requested)
    others = [backend.name for backend in found]
    allowed = f"; allowed here: {', '.join(others)} (--attention-backend)" if others else ""
    if requested is not None and asked:
        raise ValueError(f"attention backend {requested!r} needs {needs[requested]}{allowed}")
    chosen = next((backend for backend in found if backend.name not in declined), None)
    reasons = "; ".join(f"{name} needs {lacking}" for name, lacking in needs.items())
    if chosen is None:
        raise ValueError(f"no attention backend serves a cache of kind {type(spec).__name__} here: {reasons}{allowed}")
    sizes = " and ".join(map(str, sorted({shape.head_size for shape in features.shapes})))
    kind = f"{type(spec).__name__} on {platform.name} in {str(dtype).removeprefix('torch.')}, head size {sizes}"
    why = "; ".join([reasons, *(f"{name} was not chosen: {reason}" for name, reason in declined.items())]).strip("; ")
    return chosen, f"attention backend {chosen.name}: it serves {kind}{f'; {why}' if why else ''}."


def _kinds(backend: type[CacheBackend]) -> str:
    return "a cache of kind " + " or ".join(kind.__name__ for kind in backend.kinds)
