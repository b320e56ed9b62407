import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton import latent_decode
from tests.kernels.latent_cases import MIXES, SHAPES, check_latent_attention, check_latent_write

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """As many as on a GPU, most without work, would take the interpreter long."""
    monkeypatch.setattr(latent_decode, "MULTIPROCESSORS", 8)


@pytest.mark.parametrize("shape", ["small", "uneven"])
@pytest.mark.parametrize("mix", MIXES)
def test_attention(mix, shape):
    check_latent_attention(mix, "cpu", shape=SHAPES[shape], padding=3)


@pytest.mark.parametrize("mix", ["prompts", "long"])
def test_prompts_with_no_room_for_their_context(mix):
    check_latent_attention(mix, "cpu", context_bytes=0)
    check_latent_attention(mix, "cpu", page_tokens=8, shape=SHAPES["uneven"], context_bytes=16 << 10)


@pytest.mark.parametrize("queries", [2, 3])
def test_rows_that_verify_drafts(queries):
    check_latent_attention("decode", "cpu", queries=queries, padding=1)
    check_latent_attention("decode", "cpu", queries=queries, shape=SHAPES["uneven"], prefix=32)


@pytest.mark.parametrize("prefix", [16, 64, 208])
def test_a_shared_prefix(prefix):
    check_latent_attention("decode", "cpu", prefix=prefix, padding=2)


def test_more_rows_than_are_multiplied_at_once():
    check_latent_attention("decode", "cpu", repeat=3, padding=3)


@pytest.mark.parametrize("scales", ["token", "layer"])
@pytest.mark.parametrize("mix", ["mixed", "long"])
def test_a_quantized_cache(mix, scales):
    check_latent_attention(mix, "cpu", cache_dtype=FP8, scales=scales)
    check_latent_attention(mix, "cpu", cache_dtype=FP8, scales=scales, context_bytes=0, shape=SHAPES["uneven"])
    check_latent_attention("decode", "cpu", cache_dtype=FP8, scales=scales, prefix=64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", ["small", "uneven"])
def test_write(shape, interleaved):
    check_latent_write("cpu", torch.float32, SHAPES[shape], interleaved, torch.float32)
    check_latent_write("cpu", torch.float32, SHAPES[shape], interleaved, torch.int8, "token")
