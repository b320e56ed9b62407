"""Predictions against the committed measurements of one H200: docs/plan.md states them, and this keeps them true."""

from pathlib import Path

import pytest

from scripts.fit_plan import FITTED, HELD_OUT, NOT_FITTED, QUANTIZED, deviations, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "plan.md"


def test_a_model_that_was_not_fitted_is_within_a_quarter() -> None:
    found = deviations(HELD_OUT)
    assert {"b1_tpot", "b1_ttft", "prefill", "nano_greedy", "t512_128", "ctx6k"} <= found.keys()
    assert all(abs(deviation) <= 0.25 for deviation in found.values()), found


@pytest.mark.parametrize("card", FITTED, ids=lambda card: card.model)
def test_fitted_models(card) -> None:
    found = {name: value for name, value in deviations(card).items() if (card.model, name) not in NOT_FITTED}
    assert all(abs(deviation) <= 0.1 for deviation in found.values()), found


@pytest.mark.parametrize("card", QUANTIZED, ids=lambda card: card.name)
def test_time_per_token_of_quantized_weights(card) -> None:
    assert abs(deviations(card)["b1_tpot"]) <= 0.25


def test_the_page_states_every_deviation() -> None:
    assert table() in PAGE.read_text("utf-8"), "copy the table of `python -m scripts.fit_plan` into docs/plan.md"
