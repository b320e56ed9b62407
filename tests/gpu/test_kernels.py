"""The Triton kernels on a real GPU, in the precisions that matter there."""

import pytest
import torch

from tests.attention.mixes import FEATURES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from tests.kernels import kernel_cases as cases
    from tests.kernels.kernel_cases import MIXES
else:
    MIXES = {}

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(16, 8, 128), (9, 3, 64), (32, 8, 128)])
@pytest.mark.parametrize("window", [None, 40])
def test_attention(mix, dtype, heads, kv_heads, head_size, window):
    cases.check_attention(mix, "cuda", dtype, heads, kv_heads, head_size, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [64, 4096])
def test_shared_prefix(dtype, prefix):
    cases.check_attention("decode", "cuda", dtype, 16, 8, 128, prefix=prefix, padding=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(16, 8, 256), (8, 1, 256), (71, 1, 64), (32, 32, 96), (64, 8, 64)]
)
@pytest.mark.parametrize("features", ["", *FEATURES])
def test_features_and_shapes(mix, dtype, heads, kv_heads, head_size, features):
    for window in (None, 40):
        cases.check_attention(mix, "cuda", dtype, heads, kv_heads, head_size, window=window, features=features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", ["", *FEATURES])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(16, 8, 128), (8, 1, 256), (71, 1, 64)])
def test_shared_prefix_with(dtype, features, heads, kv_heads, head_size):
    cases.check_attention(
        "decode", "cuda", dtype, heads, kv_heads, head_size, prefix=1024, padding=2, features=features
    )


@pytest.mark.parametrize("rows", [6, 32, 64, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(16, 8, 256), (8, 1, 256), (71, 1, 64)])
def test_any_number_of_rows(rows, heads, kv_heads, head_size):
    """Tunings differ by rows: each must fit the device."""
    cases.check_attention(
        "decode", "cuda", torch.bfloat16, heads, kv_heads, head_size, padding=rows - 6, features="all"
    )
    cases.check_attention("decode", "cuda", torch.bfloat16, heads, kv_heads, head_size, padding=rows - 6, prefix=256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(8, 8, 64), (32, 4, 128), (16, 16, 128)])
def test_layers_of_several_shapes_share_a_backend(mix, dtype, heads, kv_heads, head_size):
    others = tuple(cases.AttentionShape(*shape) for shape in ((8, 8, 64), (32, 4, 128), (16, 16, 128)))
    cases.check_attention(mix, "cuda", dtype, heads, kv_heads, head_size, other_layers=others)


def test_more_blocks_of_queries_than_a_dimension_of_a_launch():
    cases.check_attention("mixed", "cuda", torch.bfloat16, 16, 8, 128, idle_blocks=70_000)


@pytest.mark.parametrize("mix", MIXES)
def test_attention_over_an_fp8_cache(mix):
    cases.check_attention(mix, "cuda", torch.bfloat16, 16, 8, 128, cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(32, 8, 128), (9, 3, 64), (8, 1, 256)])
@pytest.mark.parametrize("mix", MIXES)
def test_a_cache_with_a_scale_per_token_and_head(mix, heads, kv_heads, head_size, cache_dtype):
    shape = (torch.bfloat16, heads, kv_heads, head_size)
    for features in ("", "all"):
        cases.check_attention(mix, "cuda", *shape, cache_dtype=cache_dtype, scales="token", features=features)
    cases.check_attention(mix, "cuda", *shape, cache_dtype=cache_dtype, scales="token", window=20)
    cases.check_attention("decode", "cuda", *shape, cache_dtype=cache_dtype, scales="token", prefix=256, padding=2)


@pytest.mark.parametrize("mix", MIXES)
def test_a_cache_with_a_scale_per_layer(mix):
    fp8 = {"cache_dtype": torch.float8_e4m3fn, "scales": "layer"}
    cases.check_attention(mix, "cuda", torch.bfloat16, 32, 8, 128, **fp8)
    cases.check_attention("decode", "cuda", torch.bfloat16, 32, 8, 128, prefix=256, padding=2, **fp8)


@pytest.mark.parametrize(("head_dim", "rotary"), [(128, 128), (96, 48), (64, 0)])
def test_writing_a_quantized_cache(head_dim, rotary):
    for dtype in (torch.float32, torch.bfloat16):
        for cache_dtype in (torch.int8, torch.float8_e4m3fn):
            cases.check_scaled_write("cuda", dtype, cache_dtype, head_dim, rotary, "token")
        cases.check_scaled_write("cuda", dtype, torch.float8_e4m3fn, head_dim, rotary, "layer")


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(dtype):
    for rows, width in ((1, 1024), (300, 4096)):
        cases.check_norms("cuda", dtype, rows, width)
        cases.check_layer_norms("cuda", dtype, rows, width)
        cases.check_silu_mul("cuda", dtype, rows, width)
        cases.check_activations("cuda", dtype, rows, width)
    for normed in (False, True):
        cases.check_rope_and_write("cuda", dtype, 37, 16, 8, 128, 128, normed)
        cases.check_rope_and_write("cuda", dtype, 37, 6, 2, 96, 48, normed)
        cases.check_rope_and_write("cuda", dtype, 37, 6, 2, 96, 0, normed)
        cases.check_rope_and_write("cuda", dtype, 37, 71, 1, 64, 64, normed)


@pytest.mark.parametrize("decode_only", [True, False])
def test_prepare_inputs(decode_only):
    cases.check_prepare_inputs("cuda", decode_only)
