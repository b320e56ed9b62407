"""Engines that sleep: their memory is given back, and texts are the same afterwards."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.sleep_mode.memory import WEIGHTS, HostMemory
from tests.weights.models import ENGINE, GREEDY, PROMPTS, state_of, tokens, tokens_of, two_models

MIB = 1 << 20
LARGE = {"vocab_size": 40_000, "hidden_size": 128, "tie_word_embeddings": False}  # 20 MB for each end, in float32


def resident() -> int:
    """Bytes of this process's memory, by the kernel's count of pages that are there."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def fill_cache(worker) -> int:
    for pages in worker.runner.kv_tensors:
        pages.fill_(1)
    return sum(pages.nbytes for pages in worker.runner.kv_tensors)


def weight_bytes(worker) -> int:
    return sum(tensor.nbytes for tensor in worker.weights.reloadable())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_given_back_and_texts_stay(dtype):
    old, new = two_models("llama", **LARGE)
    with LLM(old, dtype=dtype, enable_sleep_mode=True, **ENGINE) as llm:
        before = tokens(llm)
        (cache,), (weights,) = llm.collective_rpc(fill_cache), llm.collective_rpc(weight_bytes)
        awake = resident()
        llm.sleep(level=1)
        assert awake - resident() > cache - MIB  # on a CPU the weights stay where they are
        assert llm.is_sleeping() and _state(llm) == "weights_offloaded"
        assert llm.wake_up() and not llm.is_sleeping() and tokens(llm) == before

        llm.collective_rpc(fill_cache)
        awake = resident()
        llm.sleep(level=2)
        assert awake - resident() > cache + weights - 2 * MIB and _state(llm) == "discard_all"
        assert not llm.wake_up(["weights"])
        llm.update_weights(state_of(new))
        assert llm.wake_up(["kv_cache"]) and _state(llm) == "awake"
        assert tokens(llm) == tokens_of(new, dtype=dtype)


def _state(llm: LLM) -> str:
    llm.llm_engine.stats = llm.llm_engine.client.core.scheduler.stats()
    states = [metric for metric in llm.get_metrics() if metric.name == "quire:engine_sleep_state"]
    return next(metric.labels["sleep_state"] for metric in states if metric.value)


def test_discarded_weights_are_read_again_from_the_checkpoint():
    old, new = two_models("qwen3")
    with LLM(old, dtype="bfloat16", enable_sleep_mode=True, **ENGINE) as llm:
        llm.update_weights(new)
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens(llm) == tokens_of(old, dtype="bfloat16")
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights")  # as vLLM's users do
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == tokens_of(old, dtype="bfloat16")


def test_a_failed_write_is_mended_from_the_checkpoint(monkeypatch):
    old, new = two_models("llama")
    with LLM(old, dtype="float32", **ENGINE) as llm:

        def half_written(model, tensors):
            model.norm.weight.fill_(7)
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr("quire.weights.updates.load_weights", half_written)
            llm.pause_generation()
            with pytest.raises(OSError, match="the disk is gone"):
                llm.update_weights(new)
        with pytest.raises(RuntimeError, match="paused"):
            tokens(llm)
        llm.resume_generation()
        assert tokens(llm) == tokens_of(old, dtype="float32")


def test_the_cache_alone_and_kept_requests():
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", enable_sleep_mode=True, **ENGINE) as llm:
        engine = llm.llm_engine
        ids = llm.enqueue(PROMPTS, GREEDY)
        for _ in range(6):
            engine.step()  # some tokens are generated
        llm.sleep(level=0, mode="keep")
        llm.release_kv_cache_memory()
        with pytest.raises(ValueError, match="sleeps already"):
            llm.release_kv_cache_memory()
        llm.sleep(level=1, mode="keep")  # the weights, too
        with pytest.raises(ValueError, match="wake it up first"):
            llm.start_weight_update()
        assert llm.wake_up()
        found = {output.request_id: list(output.outputs[0].token_ids) for output in llm.wait_for_completion()}
        assert [found[i] for i in ids] == tokens_of(old, dtype="float32")


def test_what_is_refused():
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", **ENGINE) as llm:
        for call in (llm.sleep, llm.release_kv_cache_memory):
            with pytest.raises(ValueError, match="started without sleep mode"):
                call()
        assert not llm.is_paused()
        llm.sleep(level=0)  # needs no memory to be given back
        assert llm.is_sleeping() and llm.wake_up(["scheduling"]) and not llm.is_sleeping()
        for arguments, why in (({"level": 3}, "level is 3; allowed: 0, 1, 2"), ({"mode": "x"}, "allowed: abort, wait")):
            with pytest.raises(ValueError, match=why):
                llm.sleep(**{"level": 0, **arguments})
        with pytest.raises(ValueError, match="allowed: weights, kv_cache, scheduling"):
            llm.wake_up(["all"])
        assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)) == len(PROMPTS)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_fails_half_way_is_woken_from(level, monkeypatch):
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", enable_sleep_mode=True, **ENGINE) as llm:
        release = HostMemory.release

        def fails_for_weights(memory, tag, tensors, keep):
            release(memory, tag, list(tensors)[:3], keep)
            if tag == WEIGHTS:
                raise OSError("no more")

        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "release", fails_for_weights)
            with pytest.raises(OSError, match="no more"):
                llm.sleep(level=level)
        assert llm.is_sleeping()
        with pytest.raises(ValueError, match="wake it up"):
            llm.resume_generation()
        assert llm.wake_up() and not llm.is_sleeping()
        assert tokens(llm) == tokens_of(old, dtype="float32")
