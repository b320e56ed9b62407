"""Stages on a GPU: each replays its graphs between receiving and sending; together they say what one worker says."""

import pytest
import torch

from quire import SamplingParams
from tests.executor.test_stages import generate, outputs, start, tokens
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
TEXTS = [[5, 6, 7], list(range(3, 60)), [209, 210, 105, 106, 107] * 4, [4, 8, 15, 16, 23, 42], [9] * 17]


@pytest.mark.parametrize("layout", ["TwoStages", "FourStages"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"spec_method": "ngram", "spec_tokens": 3}])
def test_stages_say_what_one_worker_says(tmp_path, family, layout, options):
    save_tiny(family, tmp_path)
    params = [GREEDY, GREEDY, SCORED, GREEDY, SCORED]
    wanted = outputs(tmp_path, None, TEXTS, params, **options)
    llm = start(tmp_path, layout, **options)
    try:
        graphs = [rank.worker.runner.graphs for rank in llm.llm_engine.client.core.executor.ranks]
        assert all((one is None) == ("enforce_eager" in options) for one in graphs)
        assert tokens(generate(llm, TEXTS, params)) == tokens(wanted)
    finally:
        llm.shutdown()
