import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton import latent_decode
from tests.kernels.latent_cases import MIXES, SHAPES, check_latent_attention, check_latent_write

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """As many as on a GPU, most without work, would take the interpreter long."""
    monkeypatch.setattr(latent_decode, "MULTIPROCESSORS", 16)
    monkeypatch.setattr(latent_decode, "MANY_MIN_KEYS", 32)


@pytest.mark.parametrize("shape", ["small", "uneven"])
@pytest.mark.parametrize("mix", MIXES)
def test_attention(mix, shape):
    check_latent_attention(mix, "cpu", shape=SHAPES[shape], padding=3)


@pytest.mark.parametrize(("mix", "shape"), [("prompts", "uneven"), ("long", "small")])
def test_prompts_with_no_room_for_their_context(mix, shape):
    check_latent_attention(mix, "cpu", shape=SHAPES[shape], page_tokens=8, context_bytes=0)


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
def test_a_quantized_cache(scales):
    check_latent_attention("mixed", "cpu", cache_dtype=FP8, scales=scales)
    check_latent_attention("prompts", "cpu", cache_dtype=FP8, scales=scales, context_bytes=0, shape=SHAPES["uneven"])
    check_latent_attention("decode", "cpu", cache_dtype=FP8, scales=scales, prefix=64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", ["small", "uneven"])
def test_write(shape, interleaved):
    check_latent_write("cpu", torch.float32, SHAPES[shape], interleaved, torch.float32)
    check_latent_write("cpu", torch.float32, SHAPES[shape], interleaved, torch.int8, "token")
