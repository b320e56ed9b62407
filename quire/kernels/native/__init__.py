"""CPU kernels in C, behind functions that take tensors. `serves(x)` says whether they can."""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from quire.kernels.kv_scales import KVScales
from quire.kernels.native.build import library
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.platforms.cpu_facts import cpu_flags
from quire.platforms.cpu_isa import allows

logger = logging.getLogger("quire")

TYPES = {torch.float32: 0, torch.bfloat16: 1}
PANEL = 32
NO_MEMORY, LOST_RANK = 2, 4  # as status.h numbers them
ATTENTION_SLOTS = 1024  # for partial results; rows that need more are attended to some at a time
SILU = 0  # of the activations, as kernels.c numbers them

LINEAR_KINDS = ("portable", "avx2", "avx512", "avx512-bf16", "neon")  # as linear.c numbers them
AMX_STATES = (  # as amx.c numbers them
    "works",
    "needs a newer compiler",
    "not there",
    "is not enabled by the operating system",
    "is not permitted to this process",
    "died in a trial",
    "gave wrong results in a trial",
)
_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
_RESULTS = {  # of functions that return a value; all others return a status of status.h
    "quire_linear_kind": ctypes.c_int,
    "quire_amx_start": ctypes.c_int,
    "quire_pin_threads": ctypes.c_int,
    "quire_quantized_kind": ctypes.c_int,
    "quire_quantized_panel_bytes": ctypes.c_int64,
    "quire_attention_fits": ctypes.c_int,
    "quire_encoder_kernels": ctypes.c_int,
    "quire_group_error": ctypes.c_char_p,
    "quire_group_bytes": ctypes.c_int64,
    "quire_group_open": ctypes.c_void_p,
}
_SIGNATURES = {
    "quire_rms_norm": "pppp lll f i",
    "quire_layer_norm": "ppppp ll f i",
    "quire_add": "pppp ll i",
    "quire_sum_rows": "pppp lll i",
    "quire_activate": "pp ll iii",
    "quire_argmax": "pp ll i",
    "quire_uniform": "ppp l i",
    "quire_draw": "ppp ll",
    "quire_accept_drafts": "ppppppppp lllll",
    "quire_rope_and_write": "ppppp f ppp llllll pl i",
    "quire_linear_kind": "",
    "quire_pack_linear": "pp ll",
    "quire_linear": "pppp lll",
    "quire_linear_amx": "pppp lll",
    "quire_int8_linear": "pppppp lll i",
    "quire_amx_start": "",
    "quire_pin_threads": "p l",
    "quire_quantized_kind": "",
    "quire_quantized_panel_bytes": "i l",
    "quire_pack_quantized": "i pp lllll",
    "quire_quantize_weight": "i pp ll i",
    "quire_quantized_lookup": "i ppp lll i",
    "quire_quantized_linear": "pp l pp lll ii",
    "quire_attention_fits": "lll",
    "quire_attention": "ppppppp lllllllll ff ppp l pl ii",
    "quire_latent_write": "ppppppp lllllll f i",
    "quire_latent_attention": "pppppppppppp lllllllllll f i",
    "quire_route": "pppp llllll ff iiiii",
    "quire_moe": "pppppppppppp lllll ii",
    "quire_add_low_rank": "ppppppp lllllll i",
    "quire_ngram_drafts": "pppppp lllll",
    "quire_texts_add": "pp ll",
    "quire_texts_remove": "p l",
    "quire_suffix_drafts": "pppppppp llll ff",
    "quire_group_error": "",
    "quire_group_bytes": "ll",
    "quire_group_open": "i lllll f",
    "quire_group_fail": "p",
    "quire_group_close": "p",
    "quire_group_counts": "pp",
    "quire_all_reduce": "pp ll i",
    "quire_all_gather": "ppp ll",
    "quire_broadcast": "pp ll",
    "quire_encoder_kernels": "",
    "quire_pack_float32": "pp ll",
    "quire_encoder_linear": "ppppppp lll f ii",
    "quire_encoder_attention": "pppppppp llllllll ff i",
    "quire_prepare_inputs": "ppppppppp llllll",
    "quire_ready_memory": "p ll pp l",
    "quire_replay": "ppp lllll",
    "quire_replay_texts": "p llll pp l pp l",
}


def serves(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in TYPES and library() is not None


def require_float32(*weights: torch.Tensor | None) -> None:
    """C reads four bytes for each number, whatever the tensor has."""
    for weight in weights:
        if weight is not None and weight.dtype is not torch.float32:
            raise ValueError(f"the weights of norms are float32, not {weight.dtype}")


def rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [n, d], whose rows may be slices of wider ones, weight [d] float32; a residual, if there is one, is added first
    and overwritten with the sum."""
    require_float32(weight)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    width = x.shape[-1]
    added = residual.data_ptr() if residual is not None else None
    sizes = (x.numel() // width, width, x.stride(0) if x.dim() == 2 else width)
    native_function("quire_rms_norm")(
        x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *sizes, eps, TYPES[x.dtype]
    )  # fmt: skip
    return out


def layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """As rms_norm; weight and bias [d] float32."""
    require_float32(weight, bias)
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    added, shift = (t.data_ptr() if t is not None else None for t in (residual, bias))
    sizes = (x.numel() // width, width)
    native_function("quire_layer_norm")(
        x.data_ptr(), added, weight.data_ptr(), shift, out.data_ptr(), *sizes, eps, TYPES[x.dtype]
    )  # fmt: skip
    return out


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, d] each."""
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    native_function("quire_add")(a.data_ptr(), b.data_ptr(), None, out.data_ptr(), *a.shape, TYPES[a.dtype])
    return out


def add_rows(x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
    """x [n, d] + table[first + rows], rows [n] int64."""
    x = x.contiguous()
    out = torch.empty_like(x)
    start = table.data_ptr() + first * x.shape[1] * x.itemsize
    native_function("quire_add")(x.data_ptr(), start, rows.data_ptr(), out.data_ptr(), *x.shape, TYPES[x.dtype])
    return out


def sum_rows(x: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """x [n, d], firsts and counts [m] int64 -> [m, d] float32."""
    x, d = x.contiguous(), x.shape[1]
    out = torch.empty(len(counts), d, dtype=torch.float32)
    pointers = (x.data_ptr(), firsts.data_ptr(), counts.data_ptr(), out.data_ptr())
    native_function("quire_sum_rows")(*pointers, len(x), len(counts), d, TYPES[x.dtype])
    return out


def activate(x: torch.Tensor, kind: int, gated: bool) -> torch.Tensor:
    """x [n, d], or if gated [n, 2 * d] -> [n, d]; `kind` as kernels/activation.py has it."""
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype)
    native_function("quire_activate")(x.data_ptr(), out.data_ptr(), rows, width, gated, kind, TYPES[x.dtype])
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return activate(gate_up, SILU, gated=True)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """x [n, d] -> [n] int64: as torch's, the first NaN of a row if it has one. torch's own takes ten times as long."""
    x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.int64)
    native_function("quire_argmax")(x.data_ptr(), out.data_ptr(), *x.shape, TYPES[x.dtype])
    return out


def rope_and_write(
    qkv: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    table: torch.Tensor | None,
    positions: torch.Tensor,  # int64
    kv_cache: torch.Tensor,
    slots: torch.Tensor,  # int64
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Without a table nothing is rotated. The norms' weights are float32. `scales`: those of tokens, of a cache in
    int8."""
    require_float32(*norms[:2] if norms else ())
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype)
    q_weight, k_weight, eps = (norms[0].data_ptr(), norms[1].data_ptr(), norms[2]) if norms else (None, None, 0.0)
    angles, rotary = (table.data_ptr(), table.shape[1]) if table is not None else (None, 0)
    native_function("quire_rope_and_write")(
        qkv.data_ptr(), q.data_ptr(), kv_cache.data_ptr(), q_weight, k_weight, eps,
        angles, positions.data_ptr(), slots.data_ptr(),
        tokens, num_heads, kv_heads, head_dim, rotary, block_size, *_scales_of(kv_cache, scales), TYPES[qkv.dtype],
    )  # fmt: skip
    return q


def _scales_of(kv_cache: torch.Tensor, scales: KVScales | None) -> tuple[int | None, int]:
    """Where the scales of tokens are, and the bytes of a page that holds them too."""
    if scales is None:
        return None, 0
    if scales.by_token is None or kv_cache.dtype is not torch.int8:
        raise ValueError(f"a cache of {kv_cache.dtype} with scales of whole layers; allowed: int8, a scale per token")
    return scales.by_token.data_ptr(), kv_cache.stride(0)


def linear_kind() -> str | None:
    """What `linear` multiplies few rows with; None without the library."""
    return LINEAR_KINDS[native_function("quire_linear_kind")()] if library() is not None else None


@functools.cache
def has_amx() -> bool:
    """Whether `linear` multiplies many rows with our own AMX kernel. The first call tries it, in a child process."""
    if library() is None or not allows("amx"):
        return False
    state = AMX_STATES[native_function("quire_amx_start")()]
    if state not in ("works", "not there") and "amx_bf16" in cpu_flags():
        logger.warning("this processor's AMX %s; AVX-512 kernels serve instead", state)
    return state == "works"


def describe() -> str:
    """The kernels in use, in two words."""
    kind = linear_kind()
    return "plain torch" if kind is None else f"{'amx' if has_amx() else kind} kernels"


def pin_threads(cpus: Sequence[int]) -> bool:
    """Bind the compute threads of the calling thread to `cpus`, one each, until it ends."""
    if not cpus or library() is None:
        return False
    return bool(native_function("quire_pin_threads")((ctypes.c_int32 * len(cpus))(*cpus), len(cpus)))


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """A bf16 weight [N, K] in the form that `linear` takes; N is rounded up to panels of 32."""
    n, k = weight.shape
    packed = torch.empty(-(-n // PANEL), -(-k // 2), PANEL, 2, dtype=torch.bfloat16)
    native_function("quire_pack_linear")(weight.contiguous().data_ptr(), packed.data_ptr(), n, k)
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, num_outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] bf16 -> [M, num_outputs], accumulated in float32."""
    x = x.contiguous()
    rows, k = x.shape
    out = torch.empty(rows, num_outputs, dtype=torch.bfloat16)
    added = bias.data_ptr() if bias is not None else None
    # Even for one row, of a tile's 16: as fast or up to twice as fast, by what its loads leave to do beside them.
    name = "quire_linear_amx" if has_amx() else "quire_linear"
    native_function(name)(x.data_ptr(), packed.data_ptr(), added, out.data_ptr(), rows, num_outputs, k)
    return out


def attention_fits(num_heads: int, num_kv_heads: int, head_size: int) -> bool:
    return library() is not None and bool(native_function("quire_attention_fits")(num_heads, num_kv_heads, head_size))


def attention_slots(shapes: Sequence[AttentionShape]) -> torch.Tensor:
    """Memory for partial results in any of those layers: a head's sums of values, greatest score and total weight."""
    size = max((shape.num_heads * (shape.head_size + 2) for shape in shapes), default=0)
    return torch.empty(ATTENTION_SLOTS * size, dtype=torch.float32)


def attention(
    q: torch.Tensor,  # [N, H, D]
    kv_cache: torch.Tensor,  # [blocks, 2, KV, block_size, D]
    rows: torch.Tensor,  # [n] int64
    query_start: torch.Tensor,  # [n + 1] int32
    seq_lens: torch.Tensor,  # [n] int32
    block_table: torch.Tensor,  # [rows, max_blocks] int32
    features: AttentionFeatures,
    slots: torch.Tensor | None = None,
    shared: int = 0,
) -> torch.Tensor:
    """`slots`: of attention_slots(), which no other call may use meanwhile. `shared`: leading keys, in blocks that all
    rows have, that are read once for all of them; then each row has one query, keys beyond those, and no window. Tokens
    after the last row's belong to nobody and get zeros, which keeps them finite. A query's bits depend
    on its own keys alone: not on other rows, chunks, `shared` or the number of threads."""
    _, num_heads, head_size = q.shape
    _, _, kv_heads, block_size, _ = kv_cache.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    if slots is None:
        slots = attention_slots([AttentionShape(num_heads, kv_heads, head_size)])
    window, softcap = features.window or 0, float(features.softcap or 0.0)
    slopes, sinks = (x.data_ptr() if x is not None else None for x in (features.slopes, features.sinks))
    native_function("quire_attention")(
        q.data_ptr(), out.data_ptr(), kv_cache.data_ptr(), rows.data_ptr(), query_start.data_ptr(),
        seq_lens.data_ptr(), block_table.data_ptr(),
        q.shape[0], block_table.stride(0), len(rows), num_heads, kv_heads, head_size, block_size, window, shared,
        float(features.scale), softcap, slopes, sinks, slots.data_ptr(), slots.numel() // (num_heads * (head_size + 2)),
        *_scales_of(kv_cache, features.kv_scales), TYPES[q.dtype], has_amx(),
    )  # fmt: skip
    return out


Instead = Callable[[str, tuple[Any, ...]], Any]
_instead: ContextVar[Instead | None] = ContextVar("instead", default=None)


@contextmanager
def calls_go_to(instead: Instead) -> Iterator[None]:
    """Inside, it is called in place of every function, with its name and arguments, by this thread."""
    before = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(before)


def native_function(name: str) -> Any:
    instead = _instead.get()
    return bound(name) if instead is None else lambda *arguments: instead(name, arguments)


@functools.cache
def bound(name: str) -> Any:
    found = library()
    if found is None:
        raise RuntimeError(f"{name} was called, but the native kernels are not available")
    function = getattr(found, name)
    function.argtypes = [_KINDS[kind] for kind in argument_types(name)]
    function.restype = _RESULTS.get(name, ctypes.c_int)
    if name not in _RESULTS:
        function.errcheck = _raise_failed
    return function


def _raise_failed(status: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if status & LOST_RANK:
        raise RuntimeError(bound("quire_group_error")().decode())
    if status & NO_MEMORY:
        raise MemoryError(f"{function.__name__} could not allocate memory to work in")
    if status:
        raise ValueError(f"{function.__name__} was called with sizes that it cannot serve")
    return status


def argument_types(name: str) -> str:
    """A letter for each: pointer, long, int or float."""
    return _SIGNATURES[name].replace(" ", "")
