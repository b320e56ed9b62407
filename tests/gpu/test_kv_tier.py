"""The CPU tier on a GPU: copies on streams of their own, beside the steps."""

import numpy as np
import pytest
import torch

from tests.tiny_models import make_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS, NUM_TOKENS = (5, 33, 50, 64, 100), 24


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return {
        family: make_reference(family, tmp_path_factory.mktemp(family), LENGTHS, NUM_TOKENS)
        for family in ("llama", "gemma3")
    }


@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 20), ("gemma3", 36)])
@pytest.mark.parametrize("depth", [1, 2])
def test_texts_are_those_of_transformers(references, family, num_blocks, depth):
    from quire import LLM, SamplingParams

    reference = references[family]
    options = {"num_gpu_blocks_override": num_blocks, "kv_offloading_size": 0.1, "async_depth": depth}
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(reference.path, skip_tokenizer_init=True, dtype="float32", max_model_len=128, **options) as llm:
        core = llm.llm_engine.client.core
        for _ in range(5):
            outputs = llm.generate(reference.prompts, greedy, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == reference.token_ids
        (tier,), (worker,) = core.scheduler.transfers.connectors, core.executor.worker.runner.transfers.connectors
        assert tier.stats().hits > 0 and tier.stats().loaded_bytes > 0
        worker.copier.drain()
        for report in worker.get_finished().reports:  # none, if all was reported with the last step
            tier.worker_reported(report)
        assert tier.index.num_busy == 0
        assert core.scheduler.kv.pool.num_free == core.num_blocks


@pytest.mark.parametrize("staged", [1, 33, 128])
def test_many_blocks_come_back_as_they_were_saved(monkeypatch, staged):
    """More than fit the buffers, to scattered slots of several parts of pinned memory, without compiling."""
    from triton import knobs

    from quire.distributed.kv_offload import host_memory, stream_copier
    from quire.distributed.kv_offload.metadata import CopyJob

    pages = [torch.randint(0, 1 << 40, (1000, 4096), device="cuda") for _ in range(8)]
    memory = host_memory.HostMemory(pages, 2000, pinned=True)
    monkeypatch.setattr(stream_copier, "STAGING_BYTES", staged * memory.slot_bytes)
    copier = stream_copier.StreamCopier(pages, memory, lambda: None)
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: compiled.append(given["key"]))
    draw = np.random.default_rng(0)
    blocks, slots = draw.permutation(np.arange(1, 1000)), draw.permutation(2000)[:999]
    before = [one.clone() for one in pages]
    copier.save(CopyJob(1, blocks, slots))
    copier.let_overwrite(1)
    for one in pages:
        one.zero_()
    copier.drain()
    copier.load(CopyJob(2, blocks, slots, "a"))
    copier.drain()
    assert all(torch.equal(one[1:], old[1:]) for one, old in zip(pages, before, strict=True))
    assert [job.number for job, _ in copier.ended()] == [1, 2] and not compiled
    copier.close()
    memory.close()
