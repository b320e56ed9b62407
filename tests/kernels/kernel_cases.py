"""Kernels against their torch references, on whichever device: in Triton's interpreter here, on a GPU in tests/gpu."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.base import StepInputs
from quire.attention.triton import TritonBackend
from quire.kernels.activation import activate, activate_mul, activate_mul_torch, activate_torch
from quire.kernels.kv_scales import KVScales, dequantized
from quire.kernels.layer_norm import layer_norm_torch
from quire.kernels.paged_attention import AttentionShape, paged_attention
from quire.kernels.prepare_inputs import prepare_inputs_torch
from quire.kernels.rms_norm import fused_add_rms_norm_torch, rms_norm_torch
from quire.kernels.rope_and_write import rope_and_write_torch
from quire.kernels.silu_mul import silu_mul_torch
from quire.kernels.triton import layer_norm as layer_norm_kernel
from quire.kernels.triton import prepare_inputs as prepare_kernel
from quire.kernels.triton import rms_norm as norm_kernel
from quire.kernels.triton import rope_and_write as rope_kernel
from quire.kernels.triton import silu_mul as silu_kernel
from quire.kernels.triton.paged_decode import DecodeWorkspace, Tuning, paged_decode
from tests.attention.mixes import filled_cache, make_features, scaled_cache

MIXES = {
    "decode": [(0, 1), (5, 1), (40, 1), (16, 1), (15, 1), (130, 1)],
    "prompts": [(0, 20), (0, 2), (33, 7), (16, 16)],
    "mixed": [(31, 1), (0, 9), (64, 1), (10, 3), (3, 1), (7, 25)],
    "long": [(0, 150), (70, 80), (300, 1)],
}


@dataclass
class Tolerance:
    atol: float
    rtol: float


def tolerance(dtype: torch.dtype) -> Tolerance:
    return Tolerance(2e-5, 1e-4) if dtype is torch.float32 else Tolerance(2e-2, 2e-2)


def check_close(ours: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    limit = tolerance(dtype)
    torch.testing.assert_close(ours.float(), wanted.float(), atol=limit.atol, rtol=limit.rtol)


def check_attention(
    mix: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    window: int | None = None,
    prefix: int = 0,
    padding: int = 0,
    cache_dtype: torch.dtype | None = None,
    features: str = "",
    other_layers: tuple[AttentionShape, ...] = (),
    idle_blocks: int = 0,
    scales: str = "",
) -> None:
    """`scales`: of the cache, by "token" or "layer".
    `features`: a name of tests.attention.mixes.FEATURES. `prefix`: tokens in blocks that all rows share. `padding`:
    rows of nobody after the others. `other_layers`: of the same model, which share the backend. `idle_blocks`: of
    queries, before the others."""
    torch.manual_seed(0)
    rows = [(cached + prefix, new) for cached, new in MIXES[mix]]
    lens = [cached + new for cached, new in rows]
    shared = prefix // block_size
    per_row = [-(-n // block_size) for n in lens]
    own = (torch.randperm(sum(per_row)) + 1 + shared).split(per_row)
    # Stale but finite data everywhere, and entries past a row's end that must never be read.
    shape = (sum(per_row) + shared + 1, 2, kv_heads, block_size, head_size)
    cache = torch.randn(shape, device=device).to(cache_dtype or dtype)
    kv_scales = KVScales(0.5, 1.75) if scales == "layer" else None
    if scales == "token":
        cache, kv_scales = filled_cache(torch.randn(shape, device=device), cache_dtype)
    table = torch.full((len(rows) + 3, max(per_row) + 1), -1, dtype=torch.int32)
    places = torch.randperm(len(rows) + 3)[: len(rows)]
    for place, blocks in zip(places.tolist(), own, strict=True):
        table[place, : len(blocks)] = blocks
        table[place, :shared] = torch.arange(1, shared + 1)
    counts = np.array([new for _, new in rows] + [1] * padding, np.int32)
    starts = torch.tensor([0, *counts.tolist()]).cumsum(0).int()
    seq_lens = torch.tensor(lens + [0] * padding).int().to(device)
    in_step = torch.cat([places, torch.full((padding,), -1)]).int().to(device)
    q = torch.randn(int(starts[-1]), heads, head_size, device=device).to(dtype)
    shapes = [*other_layers, AttentionShape(heads, kv_heads, head_size)]
    backend = TritonBackend(len(counts), shapes, dtype, torch.device(device))
    idle = np.full((idle_blocks, 2), -1, np.int32)
    blocks = torch.from_numpy(np.concatenate([idle, backend.plan_queries(counts)])).to(device)
    starts, table = starts.to(device), table.to(device)
    length = torch.tensor([prefix], dtype=torch.int32, device=device) if prefix else None
    step = StepInputs(in_step, len(q), starts, seq_lens, bool((counts == 1).all()), blocks, length)
    layer_features = make_features(features, heads, head_size**-0.5, window, device)
    layer_features = replace(layer_features, kv_scales=kv_scales)
    wanted = paged_attention(q, cache, in_step, starts, seq_lens, table, layer_features)
    real = len(q) - padding
    for _ in range(2):  # the second time finds the counters that the first left
        ours = backend.attend(q, cache, backend.build(step, table, block_size), layer_features)
        check_close(ours[:real], wanted[:real], dtype)
        assert ours.isfinite().all()


def check_norms(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    check_close(norm_kernel.rms_norm(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6), dtype)
    wanted, total = fused_add_rms_norm_torch(x, residual, weight, 1e-6)
    normed, summed = norm_kernel.fused_add_rms_norm(x, residual.clone(), weight, 1e-6)
    check_close(normed, wanted, dtype)
    assert torch.equal(summed, total)


def check_layer_norms(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, width, device=device).to(dtype)
    weight, bias = torch.randn(2, width, device=device)
    for shift in (None, bias):
        wanted = layer_norm_torch(x, weight, shift, 1e-5)
        check_close(layer_norm_kernel.layer_norm(x, None, weight, shift, 1e-5), wanted, dtype)
        total = x + residual
        stream = residual.clone()
        normed = layer_norm_kernel.layer_norm(x, stream, weight, shift, 1e-5)
        check_close(normed, layer_norm_torch(total, weight, shift, 1e-5), dtype)
        assert torch.equal(stream, total)


def check_activations(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, device=device).to(dtype)
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        check_close(activate(x, name), activate_torch(x.float(), name), dtype)
        check_close(activate_mul(x, name), activate_mul_torch(x.float(), name), dtype)


def check_silu_mul(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, device=device).to(dtype)
    check_close(silu_kernel.silu_mul(x), silu_mul_torch(x), dtype)


def check_rope_and_write(
    device: str, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary: int, normed: bool
) -> None:
    """`rotary` 0: without a table."""
    block_size, blocks = 16, tokens // 16 + 3
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.rand(64, rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(device, dtype) if rotary else None
    positions = torch.randint(0, 64, (tokens,), dtype=torch.int32).to(device) if rotary else None
    slots = torch.randperm(blocks * block_size)[:tokens].to(device)
    weights = torch.randn(2, head_dim, device=device).to(dtype)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    shape = (blocks, 2, kv_heads, block_size, head_dim)
    caches = [torch.zeros(shape, dtype=t, device=device) for t in (torch.float32, dtype)]
    # The kernel rounds once, at the end; so the torch reference must not round between norm and rotation.
    exact = (weights[0].float(), weights[1].float(), 1e-6) if normed else None
    full = table.float() if table is not None else None
    wanted = rope_and_write_torch(qkv.float(), heads, exact, full, positions, caches[0], slots)
    ours = rope_kernel.rope_and_write(qkv, heads, norms, table, positions, caches[1], slots)
    check_close(ours, wanted, dtype)
    check_close(caches[1], caches[0], dtype)


def check_scaled_write(
    device: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, rotary: int, scales: str
) -> None:
    """What is written, times its scale, is what an unquantized cache would hold; and so are its queries."""
    tokens, heads, kv_heads, block_size, blocks = 37, 6, 2, 16, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.rand(64, rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(device, dtype) if rotary else None
    positions = torch.randint(0, 64, (tokens,), dtype=torch.int32).to(device) if rotary else None
    slots = torch.randperm(blocks * block_size)[:tokens].to(device)
    shape = (blocks, 2, kv_heads, block_size, head_dim)
    plain = torch.zeros(shape, dtype=torch.float32, device=device)
    full = table.float() if table is not None else None
    wanted_q = rope_and_write_torch(qkv.float(), heads, None, full, positions, plain, slots)
    for write in (rope_and_write_torch, rope_kernel.rope_and_write):
        if scales == "token":
            cache, kv_scales = scaled_cache(shape, cache_dtype, device)
        else:
            cache, kv_scales = torch.zeros(shape, dtype=cache_dtype, device=device), KVScales(0.02, 0.01)
        q = write(qkv, heads, None, table, positions, cache, slots, kv_scales)
        check_close(q, wanted_q, dtype)
        found = dequantized(cache, torch.arange(blocks, device=device), kv_scales, torch.float32)
        most = plain.abs().amax(-1, keepdim=True)
        error = (found - plain).abs() / most.clamp(min=1e-6)
        step = 1 / 127 if cache_dtype is torch.int8 else 1 / 8
        assert 0 < float(error.max()) < 0.51 * step + (dtype is not torch.float32) / 128


def check_prepare_inputs(device: str, decode_only: bool) -> None:
    rng = np.random.default_rng(0)
    counts = np.ones(5, np.int32) if decode_only else np.array([3, 1, 40, 1, 7], np.int32)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device)
    token_rows = None if decode_only else torch.from_numpy(np.repeat(np.arange(5, dtype=np.int32), counts)).to(device)
    rows = torch.tensor([4, 0, 7, 2, 5], dtype=torch.int32, device=device)
    token_ids = torch.from_numpy(rng.integers(0, 1000, (9, 96), dtype=np.int32)).to(device)
    tables = [torch.from_numpy(rng.integers(1, 99, (9, 96 // size), dtype=np.int32)).to(device) for size in (16, 32)]
    computed = torch.from_numpy(rng.integers(0, 50, 9)).to(device)
    states = [computed.clone(), computed.clone()]
    wanted = prepare_inputs_torch(rows, starts, token_rows, token_ids, states[0], tables, [16, 32])
    ids, positions, slots, seq_lens = prepare_kernel.prepare_inputs(
        rows, starts, token_rows, token_ids, states[1], tables, [16, 32]
    )
    assert torch.equal(ids.long(), wanted.input_ids) and torch.equal(positions.long(), wanted.positions)
    assert torch.equal(seq_lens, wanted.seq_lens) and torch.equal(states[0], states[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(slots, wanted.slot_mapping, strict=True))
    if decode_only:
        padded = torch.cat([rows, torch.full((3,), -1, dtype=torch.int32, device=device)])
        before = states[1].clone()
        ids, positions, slots, seq_lens = prepare_kernel.prepare_inputs(
            padded, starts, None, token_ids, states[1], tables, [16, 32]
        )
        assert ids[5:].tolist() == positions[5:].tolist() == seq_lens[5:].tolist() == [0, 0, 0]
        assert all(int(s[5:].max()) < size for s, size in zip(slots, (16, 32), strict=True))
        assert torch.equal(states[1][rows.long()], before[rows.long()] + 1)


def check_split_decode(device: str, dtype: torch.dtype, tuning: Tuning, features: str = "") -> None:
    """Rows of uneven length, some shorter than a split may be."""
    lens = torch.tensor([1, 40, 200, 330, 129], dtype=torch.int32)
    pages = [-(-int(n) // 16) for n in lens]
    cache = torch.randn(sum(pages) + 1, 2, 2, 16, 16).to(device, dtype)
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for row, ids in enumerate((torch.randperm(sum(pages)) + 1).split(pages)):
        table[row, : len(ids)] = ids
    rows = torch.arange(len(lens), dtype=torch.int32)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    q = torch.randn(len(lens), 4, 16).to(device, dtype)
    out, space = torch.empty_like(q), DecodeWorkspace(len(lens), [AttentionShape(4, 2, 16)], torch.device(device))
    rows, starts, lens, table = (x.to(device) for x in (rows, starts, lens, table))
    layer_features = make_features(features, 4, 0.25, device=device)
    for _ in range(2):
        paged_decode(q, out, cache, rows, None, lens, table, space, layer_features, tuning=tuning)
        check_close(out, paged_attention(q, cache, rows, starts, lens, table, layer_features), dtype)
