"""The kernels of latent attention on a real GPU, at models' shapes and in the precisions that matter there."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from tests.kernels import latent_cases as cases
    from tests.kernels.latent_cases import MIXES, SHAPES
else:
    MIXES = SHAPES = {}

DTYPES = [torch.float32, torch.bfloat16]
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", MIXES)
def test_attention(mix, shape, dtype):
    cases.check_latent_attention(mix, "cuda", dtype, SHAPES[shape], padding=3, context_bytes=1 << 24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", ["prompts", "mixed", "long"])
def test_prompts_with_no_room_for_their_context(mix, shape, dtype):
    cases.check_latent_attention(mix, "cuda", dtype, SHAPES[shape], context_bytes=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", ["V2-Lite", "V3", "MiniCPM3"])
def test_rows_that_verify_drafts(shape, queries, dtype):
    cases.check_latent_attention("decode", "cuda", dtype, SHAPES[shape], queries=queries, padding=1)
    cases.check_latent_attention("decode", "cuda", dtype, SHAPES[shape], queries=queries, prefix=256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [64, 4096])
@pytest.mark.parametrize("shape", ["V2-Lite", "V3", "MiniCPM3"])
def test_a_shared_prefix(shape, prefix, dtype):
    cases.check_latent_attention("decode", "cuda", dtype, SHAPES[shape], prefix=prefix, padding=2)


@pytest.mark.parametrize("repeat", [1, 2, 5, 40])
@pytest.mark.parametrize("shape", ["V2-Lite", "V3"])
def test_any_number_of_rows(shape, repeat):
    cases.check_latent_attention("decode", "cuda", torch.bfloat16, SHAPES[shape], repeat=repeat)
    cases.check_latent_attention("mixed", "cuda", torch.bfloat16, SHAPES[shape], repeat=repeat)


@pytest.mark.parametrize("scales", ["token", "layer"])
@pytest.mark.parametrize("shape", ["V2-Lite", "V3", "MiniCPM3"])
@pytest.mark.parametrize("mix", MIXES)
def test_an_fp8_cache(mix, shape, scales):
    kind = {"cache_dtype": FP8, "scales": scales}
    cases.check_latent_attention(mix, "cuda", torch.bfloat16, SHAPES[shape], context_bytes=1 << 24, **kind)
    cases.check_latent_attention(mix, "cuda", torch.bfloat16, SHAPES[shape], context_bytes=0, **kind)
    cases.check_latent_attention("decode", "cuda", torch.bfloat16, SHAPES[shape], prefix=256, **kind)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_write(dtype, shape, interleaved):
    cases.check_latent_write("cuda", dtype, SHAPES[shape], interleaved, dtype)
    for scales in ("token", "layer"):
        cases.check_latent_write("cuda", dtype, SHAPES[shape], interleaved, FP8, scales)
