"""Kernels of latent attention compiled for a Hopper device without one, at models' shapes: they must fit it. In bf16,
or with QUIRE_ALL_KERNELS=1 (make test-kernels) also in float32."""

import os
import re

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.triton import (  # noqa: E402
    latent_decode,
    latent_expand,
    latent_prefill,
    latent_product,
    latent_write,
)
from tests.kernels.launched import launched  # noqa: E402
from tests.kernels.test_compile import FLOAT, FP8, HALF, INT, compiled  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")

MAX_SHARED = 227 << 10
KINDS = [HALF, FLOAT] if os.environ.get("QUIRE_ALL_KERNELS") else [HALF]
RANK, ROPE, NOPE, V, PAGE_TOKENS = 512, 64, 128, 128, 16
LATENT = {"RANK": RANK, "ROPE": ROPE, "RP": RANK, "PP": ROPE}
INTS = dict.fromkeys(("rows", "query_start", "seq_lens", "block_table", "prefix_len", "counts", "starts"), INT)
INTS |= dict.fromkeys(("query_blocks", "sources", "used", "decode_tokens", "prompt_tokens", "tokens"), INT)
INTS |= dict.fromkeys(
    ("table_stride", "min_tiles", "prefix_splits", "rope_token", "rope_head", "q_token", "q_head", "num_tokens"), "i32"
)
INTS |= dict.fromkeys(("first_unit", "units", "most", "x_token", "x_head", "kv_token"), "i32")
INTS |= dict.fromkeys(("num_rows", "num_tokens", "capacity", "min_queries"), "i32")
FLOATS = {"factor": "fp32", "cache_scale": "fp32", "inverse": "fp32", "token_scales": FLOAT, "sums": FLOAT}


def pages(by_token: bool = False) -> dict[str, int]:
    page = PAGE_TOKENS * (RANK + ROPE)
    return {
        "BLOCK_SIZE": PAGE_TOKENS,
        "PAGE": page + 64 * by_token,
        "SCALE_PAGE": (page + 64) // 4 * by_token,
        "QUANTIZED": by_token,
    }


def compiles(kernel, types: dict[str, str], constants: dict[str, object], warps: int, stages: int):
    types = INTS | FLOATS | types
    constants = {name: value for name, value in (constants | {"PDL": True}).items() if name in kernel.arg_names}
    made = compiled(kernel, types, constants, warps, stages)
    assert made.metadata.shared <= MAX_SHARED
    return made


@pytest.mark.parametrize(
    ("heads", "queries", "kind", "cache"),
    [
        (16, 1, HALF, HALF),
        (16, 4, HALF, HALF),
        (128, 1, HALF, HALF),
        (16, 1, HALF, FP8),
        (128, 1, HALF, FP8),
        (16, 1, FLOAT, FLOAT),
    ],
)
def test_decode(heads, queries, kind, cache):
    dtype = {HALF: latent_decode.torch.bfloat16, FLOAT: latent_decode.torch.float32}[kind]
    tile, columns = latent_decode.tile_of_heads(heads, queries, dtype)
    tuning = latent_decode.tuning_for(columns, dtype, cache == FP8)
    types = {"q": kind, "q_rope": kind, "kv_cache": cache, "out": FLOAT}
    constants = LATENT | pages(cache == FP8) | {
        "H": heads, "HB": tile, "Q": queries, "M": columns, "CHUNK": 32 if kind == FLOAT else RANK,
        "TILE": tuning.tile, "PREFIX": False, "DECODE_ONLY": True,
    }  # fmt: skip
    made = compiles(latent_decode._decode_kernel, types, constants, tuning.warps, tuning.stages)
    if cache == HALF:
        # A tile is copied to shared memory once, for both products; one of 32 keys is too low for one of them.
        assert "wgmma" in made.asm["ptx"] and "cp.async" in made.asm["ptx"]
        assert ("mma.sync" in made.asm["ptx"]) == (tuning.tile < 64)
    if cache == HALF and tuning.stages > 2:
        # The next tile is on its way while one is multiplied: not every copy has to have arrived.
        assert re.search(r"cp\.async\.wait_group\s+(0x)?0*[1-9]", made.asm["ptx"])


@pytest.mark.parametrize("kind", KINDS)
def test_absorbed_prompts(kind):
    full = kind == FLOAT
    types = {"q": kind, "q_rope": kind, "kv_cache": kind, "out": kind}
    constants = LATENT | pages() | {
        "H": 16, "HB": 16, "Q": 1 if full else 4, "M": 16 if full else 64, "CHUNK": 32 if full else RANK,
        "TILE": 16 if full else 64, "QUERIES": 32 if full else 128,
    }  # fmt: skip
    compiles(latent_prefill._absorbed_kernel, types, constants, 4 if full else 8, 1 if full else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_prompts(kind):
    full = kind == FLOAT
    types = {"kv_cache": kind, "w_uk": kind, "w_uv": kind, "keys": kind, "values": kind, "ropes": kind}
    sizes = {"NOPE": NOPE, "V": V, "ROPE": ROPE, "PP": ROPE, "NP": NOPE, "VP": V, "H": 16}
    constants = sizes | pages() | {"RANK": RANK, "BLOCK": 32 if full else 128, "BLOCK_K": 16 if full else 64}
    compiles(latent_expand._expand_kernel, types, constants, 8, 1 if full else 3)
    types |= {"q": kind, "out": kind}
    constants = sizes | {"QUERIES": 32 if full else 128, "TILE": 16 if full else 64}
    made = compiles(latent_prefill._expanded_kernel, types, constants, 4 if full else 8, 1 if full else 3)
    assert full or "wgmma" in made.asm["ptx"]


@pytest.mark.skipif(len(KINDS) == 1, reason="compiles for eight seconds")
def test_expanded_prompts_of_wide_heads(monkeypatch, tmp_path):
    """GLM-4.7-Flash's, of which fewer fit shared memory at a time."""
    heads, nope, v, tokens = 20, 192, 256, 256

    def half(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    def attend():
        plan = latent_expand.ExpansionPlan(ints(8), ints(512), ints(1), ints(8), ints(tokens))
        weights = half(heads, nope, RANK), half(heads, v, RANK)
        expanded = latent_expand.latent_expand(half(4, PAGE_TOKENS, RANK + ROPE), plan, *weights, ROPE)
        q, out = half(tokens, heads, nope + ROPE), half(tokens, heads, v)
        latent_prefill.expanded_prefill(q, out, expanded, plan, ints(4, 2), ints(9), ints(8), 0.1)

    kernels = launched(monkeypatch, attend)
    assert [one.name for one in kernels] == ["_expand_kernel", "_expanded_kernel"]
    assert all(one.fits and one.spilled_bytes(tmp_path) < 64 for one in kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind):
    full = kind == FLOAT
    into = {"J": RANK, "K": NOPE, "W_J": 1, "W_K": RANK, "PARTS": False, "FROM_UNITS": False, "MAPPED": True, "H": 16}
    out_of = {"J": V, "K": RANK, "W_J": RANK, "W_K": 1, "PARTS": True, "FROM_UNITS": True, "MAPPED": True, "H": 16}
    for constants, x, chunk in ((into, kind, 64), (out_of, FLOAT, RANK)):
        types = {"x": x, "w": kind, "y": kind, "counts": INT}
        gemv = {"KP": constants["K"], "BLOCK_J": 8192 // constants["K"], "AT_ONCE": 16}
        compiles(latent_product._gemv_kernel, types, constants | gemv, 4, 3)
        dot = {"BLOCK_U": 16, "BLOCK_J": 64, "BLOCK_K": 32 if full else chunk}
        compiles(latent_product._dot_kernel, types, constants | dot, 4, 1 if constants["PARTS"] else 3)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_products_of_many(monkeypatch, tmp_path, most):
    """At 256 rows, in loads and stores of 16 bytes."""
    q = torch.empty(256, 16, NOPE + ROPE, dtype=torch.bfloat16)[..., :NOPE]
    w_uk, w_uv = (torch.empty(16, size, RANK, dtype=torch.bfloat16) for size in (NOPE, V))
    parts = latent_product.Parts.empty(256, 16, most, RANK, q.device)

    def multiply():
        latent_product.into_latent(q, w_uk)
        latent_product.out_of_latent(parts, w_uv, torch.empty(256, 16, V, dtype=torch.bfloat16))

    kernels = launched(monkeypatch, multiply)
    assert [one.name for one in kernels] == ["_many_kernel"] * 2
    for one in kernels:
        ptx = one.kernel.asm["ptx"]
        assert one.fits and one.spilled_bytes(tmp_path) == 0 and "wgmma" in ptx
        assert re.findall(r"st\.global\S*", ptx) and set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    first, second = (one.kernel.asm["ptx"] for one in kernels)
    assert first.index("ld.global.v4") < first.index("griddepcontrol.wait")
    assert "cp.async.cg" in second and "cp.async.ca" not in second


def test_write_and_plan():
    types = {"q_rope": HALF, "kv": HALF, "norm_weight": FLOAT, "table": FLOAT, "positions": INT, "slots": INT}
    constants = {"H": 16, "HB": 16, "HALF": 32, "LAYER_SCALE": False, "LARGEST": 448.0, "INTERLEAVED": True, **LATENT}
    del constants["PP"]
    for cache in (HALF, FP8):
        compiles(latent_write._latent_write_kernel, types | {"kv_cache": cache}, constants | pages(cache == FP8), 4, 3)
    compiles(latent_expand._plan_kernel, {}, {"ROWS": 1024, "BLOCK_SIZE": 16, "STEP": 1024}, 4, 3)
