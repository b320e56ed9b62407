"""Ranks in processes of their own write what one process writes, in every layout and family: `make tp-matrix`. Requests
of all kinds at once (tests/spec_decode/test_matrix.py): n, logprobs, grammars, penalties, seeds, stops."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.executor.rank_matrix import LAYOUTS, RUN_ALL, RankModels, by_turns, quantization
from tests.spec_decode.test_matrix import BLOCKS, KINDS, generate, same_logprobs

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 48, "async_scheduling": False},
    {"enable_prefix_caching": False, "num_gpu_blocks_override": 56},  # preempted
    {"max_num_batched_tokens": 48},
]
ALL = by_turns(SETTINGS)
PART = [run for run in ALL if run[:2] == ("tp 2 x pp 2", "gptq")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> RankModels:
    return RankModels(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def singles(models: RankModels) -> Callable[[str, str | None], list[Any]]:
    return cache(lambda family, method: generate(models.target(family), quantization=method))


@pytest.mark.parametrize(("layout", "family", "number"), ALL if RUN_ALL else PART)
def test_processes_write_what_one_writes(
    models: RankModels, singles: Callable[[str, str | None], list[Any]], layout: str, family: str, number: int
) -> None:
    tensor, stages = LAYOUTS[layout]
    method = quantization(family, layout)
    blocks = {"num_gpu_blocks_override": 2 * BLOCKS}  # layers of a rank may be in more groups
    given = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "quantization": method}
    found = generate(models.target(family), **(blocks | SETTINGS[number] | given))
    for kind, ours, theirs in zip(KINDS, found, singles(family, method), strict=True):
        for one, single in zip(ours, theirs, strict=True):
            assert list(one.token_ids) == list(single.token_ids), kind
            assert one.finish_reason == single.finish_reason, kind
            assert same_logprobs(one.logprobs, single.logprobs), kind
