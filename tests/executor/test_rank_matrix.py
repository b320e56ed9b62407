"""Ranks in processes of their own write what one process writes, in every layout and family: `make tp-matrix`. Requests
of all kinds at once (tests/spec_decode/test_matrix.py): n, logprobs, grammars, penalties, seeds, stops."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.spec_decode.matrix_models import Models
from tests.spec_decode.test_matrix import BLOCKS, KINDS, generate, same_logprobs

LAYOUTS = {"tp 2": (2, 1), "tp 4": (4, 1), "pp 2": (1, 2), "pp 4": (1, 4), "tp 2 x pp 2": (2, 2)}
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "qwen3-moe"]
# Met by turns: every layout and every family has each.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 48, "async_scheduling": False},
    {"enable_prefix_caching": False, "num_gpu_blocks_override": 56},  # preempted
    {"max_num_batched_tokens": 48},
]
ALL = [
    pytest.param(layout, family, SETTINGS[(i + j) % len(SETTINGS)], id=f"{layout}-{family}-{(i + j) % len(SETTINGS)}")
    for i, layout in enumerate(LAYOUTS)
    for j, family in enumerate(FAMILIES)
]
RUNS = ALL if os.environ.get("QUIRE_TP_MATRIX") == "all" else [ALL[-FAMILIES.index("qwen3-moe") - 1]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def singles(models: Models) -> Callable[[str], list[Any]]:
    return cache(lambda family: generate(models.target(family)))


@pytest.mark.parametrize(("layout", "family", "settings"), RUNS)
def test_processes_write_what_one_writes(
    models: Models, singles: Callable[[str], list[Any]], layout: str, family: str, settings: dict[str, Any]
) -> None:
    tensor, stages = LAYOUTS[layout]
    blocks = {"num_gpu_blocks_override": 2 * BLOCKS}  # layers of a rank may be in more groups
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    found = generate(models.target(family), **(blocks | settings | sizes))
    for kind, ours, theirs in zip(KINDS, found, singles(family), strict=True):
        for one, single in zip(ours, theirs, strict=True):
            assert list(one.token_ids) == list(single.token_ids), kind
            assert one.finish_reason == single.finish_reason, kind
            assert same_logprobs(one.logprobs, single.logprobs), kind
