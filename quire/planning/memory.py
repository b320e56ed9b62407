"""Memory of a rank: weights, activations, and what is left for keys and values."""

from dataclasses import dataclass

from quire.config.values import finite_number, whole_number
from quire.messages.kv_cache import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    LatentSpec,
    SlidingWindowSpec,
    make_groups,
    shared_page_bytes,
)
from quire.planning.shape import ModelShape
from quire.planning.sizes import Layout, stage_ranges
from quire.planning.weight_format import WeightFormat

# The CUDA context, loaded kernels, library workspaces and the margin that the worker keeps.
CONTEXT_BYTES = int(1.6 * 2**30)
GRAPH_BYTES_PER_LAYER = 20 << 20  # of all captured sizes
CACHE_DTYPES = {"auto": None, "bfloat16": "bfloat16", "float16": "float16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Limits:
    """Options of the engine that decide over memory."""

    max_model_len: int
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    utilization: float = 0.9
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            whole_number(name, getattr(self, name))
        finite_number("gpu_memory_utilization", self.utilization, above=0.0, maximum=1.0)
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype is {self.cache_dtype!r}; allowed: {', '.join(CACHE_DTYPES)}")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that has the least left; capacities are of the whole engine."""

    total: int
    usable: int
    weights: int
    activations: int
    context: int
    kv_cache: int  # below zero: so much is missing
    bytes_per_token: dict[str, int]  # by kind of attention layer
    capacity_tokens: int
    capacity_requests: float  # of max_model_len tokens

    @property
    def fits(self) -> bool:
        return self.capacity_requests >= 1


def kv_heads_of_rank(shape: ModelShape, tensor: int) -> int:
    return max(1, shape.kv_heads // tensor)


def layer_bytes(shape: ModelShape, weights: WeightFormat, layer: int, tensor: int) -> float:
    """Of a rank's share of a layer; the router is repeated on every rank."""
    dense = 8.0 * shape.dtype_bytes if weights.experts_only else weights.bits
    found = shape.attention_of_rank(tensor) * dense
    if shape.latent is not None:  # what latents are expanded by is not kept quantized
        expanding = shape.heads // tensor * shape.latent.rank * (shape.latent.nope + shape.latent.v)
        found += expanding * (8.0 * shape.dtype_bytes - dense)
    if shape.sparse[layer] and shape.experts is not None:
        routed = shape.matrices * shape.hidden * shape.experts.count * shape.experts.width
        shared = shape.matrices * shape.hidden * shape.experts.shared_width
        found += (routed * weights.bits + shared * dense) / tensor
        found += shape.hidden * shape.experts.count * 8 * shape.dtype_bytes
    else:
        found += shape.mlp_parameters(layer) * dense / tensor
    return found / 8


def head_bytes(shape: ModelShape, tensor: int) -> int:
    return -(-shape.vocab // tensor) * shape.hidden * shape.dtype_bytes


def weight_bytes(shape: ModelShape, weights: WeightFormat, layout: Layout) -> list[int]:
    """Of a rank of each stage."""
    found = []
    for stage, layers in enumerate(stage_ranges(shape.num_layers, layout.stages)):
        size = sum(layer_bytes(shape, weights, i, layout.tensor) for i in layers)
        last = stage == layout.stages - 1
        if stage == 0:
            size += head_bytes(shape, layout.tensor) + shape.positions * shape.hidden * shape.dtype_bytes
        if last and not (shape.tied and stage == 0):
            size += head_bytes(shape, layout.tensor)
        found.append(int(size))
    return found


def activation_bytes(shape: ModelShape, layout: Layout, limits: Limits, num_layers: int) -> int:
    """Peak of the largest step, the buffers of sampling and penalties, and captured graphs."""
    width, tokens = shape.dtype_bytes, limits.max_num_batched_tokens
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size // layout.tensor
    mlp = shape.matrices * shape.width // layout.tensor
    if shape.experts is not None:
        each = shape.experts.top_k * (shape.matrices * shape.experts.width // layout.tensor + shape.hidden)
        mlp = max(each, mlp if not all(shape.sparse) else 0)
    step = tokens * width * (4 * shape.hidden + max(attention, mlp))
    rows = limits.max_num_seqs
    logits = rows * shape.vocab * (width + 2 * 4)
    penalties = (rows + rows // 2) * shape.vocab * 5
    state = rows * limits.max_model_len * 5
    return step + logits + penalties + state + GRAPH_BYTES_PER_LAYER * num_layers


def cache_specs(shape: ModelShape, limits: Limits, tensor: int, layers: range) -> dict[int, KVCacheSpec]:
    dtype = CACHE_DTYPES[limits.cache_dtype] or ("float32" if shape.dtype_bytes == 4 else "bfloat16")
    sizes = (limits.block_size, kv_heads_of_rank(shape, tensor), shape.head_size, dtype)
    found: dict[int, KVCacheSpec] = {}
    for layer in layers:
        if shape.latent is not None:
            latent = (shape.latent.rank, shape.latent.rope, dtype)
            found[layer] = LatentSpec(limits.block_size, *latent, index_size=shape.latent.index_size)
            continue
        window = shape.windows[layer]
        found[layer] = FullAttentionSpec(*sizes) if window is None else SlidingWindowSpec(*sizes, sliding_window=window)
    return found


def blocks_of_request(groups: tuple[KVCacheGroup, ...], length: int, step_tokens: int) -> int:
    """Blocks that a request of `length` tokens holds at most; a window keeps those of a step besides."""
    total = 0
    for group in groups:
        kept = length
        if isinstance(group.spec, SlidingWindowSpec):
            kept = min(length, group.spec.sliding_window - 1 + min(step_tokens, length) + group.spec.block_size)
        total += -(-kept // group.spec.block_size)
    return total


def rank_memory(shape: ModelShape, weights: WeightFormat, layout: Layout, total: int, limits: Limits) -> RankMemory:
    """Of the stage with the least capacity."""
    stages = enumerate(stage_ranges(shape.num_layers, layout.stages))
    by_stage = weight_bytes(shape, weights, layout)
    found = [_stage_memory(shape, layout, by_stage[stage], total, limits, layers) for stage, layers in stages]
    return min(found, key=lambda memory: (memory.capacity_requests, memory.kv_cache))


def _stage_memory(
    shape: ModelShape, layout: Layout, weights: int, total: int, limits: Limits, layers: range
) -> RankMemory:
    specs = cache_specs(shape, limits, layout.tensor, layers)
    groups = make_groups(specs)
    activations = activation_bytes(shape, layout, limits, len(layers))
    usable = int(total * limits.utilization)
    left = usable - weights - activations - CONTEXT_BYTES
    block = shared_page_bytes(groups) * max(len(group.layers) for group in groups)
    blocks = max(0, left // block - 1)
    request = blocks_of_request(groups, limits.max_model_len, limits.max_num_batched_tokens)
    requests = blocks / request
    kinds: dict[str, int] = {}
    for spec in specs.values():
        name = "latent" if isinstance(spec, LatentSpec) else "full"
        name = f"window {spec.sliding_window}" if isinstance(spec, SlidingWindowSpec) else name
        kinds[name] = kinds.get(name, 0) + spec.page_bytes // spec.block_size
    tokens = int(requests * limits.max_model_len)
    return RankMemory(total, usable, weights, activations, CONTEXT_BYTES, left, kinds, tokens, requests)
