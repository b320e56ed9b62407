"""Sizes of graphs that users choose: smaller steps are replayed, larger ones launched, with the same tokens."""

import pytest

from quire import LLM, SamplingParams
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5 + i, 6, 7] for i in range(12)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


def tokens(model, sizes, **options):
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 200}
    with LLM(model, max_num_seqs=16, **settings, **options) as llm:
        graphs = llm.llm_engine.client.core.executor.worker.runner.graphs
        assert (graphs and (graphs.decode_rows, graphs.mixed_tokens)) == sizes
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        single = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False)
    return [one.outputs[0].token_ids for one in [*outputs, *single]]


def test_the_tokens_do_not_depend_on_them(tiny):
    wanted = tokens(tiny, None, enforce_eager=True)
    assert tokens(tiny, ([1, 4], [64]), cudagraph_capture_sizes=[1, 4, 64]) == wanted
    assert tokens(tiny, ([1, 2, 4, 8], []), max_cudagraph_capture_size=8) == wanted
    assert tokens(tiny, ([], []), compilation_config={"max_cudagraph_capture_size": 0}) == wanted
