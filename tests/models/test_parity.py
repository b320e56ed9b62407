"""Our logits against transformers', in float32, however the prompt is cut into steps."""

import pytest
import torch

from tests.models.helpers import TinyRunner, ours_from
from tests.models.references import FAMILIES, LONGROPE, build_reference


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    reference = build_reference(request.param)
    return reference, ours_from(reference)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(reference, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_whole_prompt(pair):
    reference, model = pair
    tokens = prompt(29)
    (logits,) = TinyRunner(model, 1).step([(0, tokens)])
    assert_close(logits, expected(reference, tokens))


def test_chunks_then_decode(pair):
    reference, model = pair
    tokens = prompt(23)
    runner = TinyRunner(model, 1)
    parts = [tokens[:9], tokens[9:20], tokens[20:21], tokens[21:22], tokens[22:]]
    logits = torch.cat([runner.step([(0, part)])[0] for part in parts])
    assert_close(logits, expected(reference, tokens))


def test_decode_and_prefill_in_one_step(pair):
    reference, model = pair
    texts = [prompt(18, 2), prompt(7, 3), prompt(25, 4), prompt(11, 5)]
    runner = TinyRunner(model, 4)
    runner.step([(0, texts[0][:-1]), (1, texts[1][:-1]), (2, texts[2][:12])])
    results = runner.step([(2, texts[2][12:]), (0, texts[0][-1:]), (3, texts[3]), (1, texts[1][-1:])])
    for row, logits in zip((2, 0, 3, 1), results, strict=True):
        assert_close(logits, expected(reference, texts[row])[-len(logits) :])


def test_dynamic_rope_beyond_the_trained_length_equals_generation_with_a_cache():
    reference = build_reference("llama-dynamic-rope", max_position_embeddings=12)
    tokens = prompt(20)
    past, theirs = None, []
    with torch.inference_mode():
        for part in [tokens[:12], *([token] for token in tokens[12:])]:
            out = reference(torch.tensor([part]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            theirs.append(out.logits[0])
    (logits,) = TinyRunner(ours_from(reference), 1).step([(0, tokens)])
    assert_close(logits, torch.cat(theirs))


def test_longrope_beyond_the_original_length():
    rope = LONGROPE | {"original_max_position_embeddings": 8}
    reference = build_reference("llama-longrope", rope_parameters=rope)
    tokens = prompt(20)
    (logits,) = TinyRunner(ours_from(reference), 1).step([(0, tokens)])
    assert_close(logits, expected(reference, tokens))


def test_bfloat16_stays_near_float32():
    reference = build_reference("llama")
    model = ours_from(reference, torch.bfloat16)
    tokens = prompt(20)
    (logits,) = TinyRunner(model, 1).step([(0, tokens)])
    theirs = expected(reference, tokens)
    assert (logits.float() - theirs).abs().max() < 0.05 * theirs.abs().max()
