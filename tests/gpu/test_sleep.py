"""Sleep and new weights on a GPU: memory is given back, captured graphs stay valid."""

import pytest
import torch

from quire import LLM
from tests.weights.models import GREEDY, PROMPTS, state_of, tokens, two_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
LARGE = {"vocab_size": 40_000, "hidden_size": 512, "num_attention_heads": 8, "tie_word_embeddings": False}
ENGINE = {"skip_tokenizer_init": True, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 * MIB}


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_is_given_back_and_graphs_stay_valid():
    old, new = two_models("llama", **LARGE)
    with LLM(new, dtype="bfloat16", **ENGINE) as llm:
        of_new = tokens(llm)
    with LLM(old, dtype="bfloat16", enable_sleep_mode=True, **ENGINE) as llm:
        before, awake = tokens(llm), used()
        graphs = llm.collective_rpc(lambda worker: worker.runner.graphs.num_replays)[0]
        assert graphs > 0
        for level in (1, 2):
            llm.sleep(level=level)
            assert awake - used() > 256 * MIB + 2 * 40_000 * 512 * 2 - 32 * MIB
            llm.wake_up()
            assert tokens(llm) == before
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.update_weights(state_of(new))
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == of_new
        assert llm.collective_rpc(lambda worker: worker.runner.graphs.num_replays)[0] > graphs


def test_another_engine_of_the_process_computes_meanwhile():
    """What kernels and libraries keep for the process must not be in the memory that is given back."""
    old, new = two_models("mixtral", hidden_size=128, intermediate_size=256)
    with LLM(old, dtype="bfloat16", enable_sleep_mode=True, **ENGINE) as llm:
        before = tokens(llm)
        llm.sleep(level=2)
        with LLM(new, dtype="bfloat16", **ENGINE) as other:
            of_new = tokens(other)
        llm.wake_up(["weights"])
        llm.update_weights(state_of(new))
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == of_new != before


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"quantization": "int4"}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_texts_after_an_update_are_those_of_a_fresh_engine(family, options):
    old, new = two_models(family, hidden_size=128, intermediate_size=256)
    with LLM(new, dtype="bfloat16", **ENGINE, **options) as llm:
        of_new = tokens(llm)
    with LLM(old, dtype="bfloat16", **ENGINE, **options) as llm:
        before = tokens(llm)
        llm.update_weights(new)
        assert tokens(llm) == of_new != before
        llm.update_weights({name: tensor.cuda() for name, tensor in state_of(old).items()})
        assert tokens(llm) == before


def test_kept_requests_are_computed_anew_after_the_cache_was_discarded():
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", enable_sleep_mode=True, **ENGINE) as llm:
        expected = tokens(llm)
        ids = llm.enqueue(PROMPTS, GREEDY)
        for _ in range(6):
            llm.llm_engine.step()
        llm.sleep(level=1, mode="keep")
        llm.wake_up()
        found = {output.request_id: list(output.outputs[0].token_ids) for output in llm.wait_for_completion()}
        assert [found[i] for i in ids] == expected
