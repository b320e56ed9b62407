"""A lost device ends the engine; a failed step does not."""

import pytest

from quire import LLM, SamplingParams
from quire.messages.plan import DeviceLostError
from tests.tiny_models import save_tiny


def dead():
    raise RuntimeError("an illegal memory access was encountered")


def broken(*_):
    raise RuntimeError("launch failed")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_lost_device_ends_the_engine_with_the_cause(tmp_path, monkeypatch, async_scheduling):
    save_tiny("qwen3", tmp_path)
    arguments = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    prompt, params = {"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(str(tmp_path), async_scheduling=async_scheduling, **arguments) as llm:
        worker = llm.llm_engine.client.core.executor.worker
        monkeypatch.setattr(worker.runner.model, "compute_logits", broken)
        (failed,) = llm.generate([prompt], params, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        monkeypatch.setattr(worker.recovery, "_probe", dead)
        with pytest.raises(DeviceLostError, match="no longer computes: RuntimeError: launch failed"):
            llm.generate([prompt], params, use_tqdm=False)
