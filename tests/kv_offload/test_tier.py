"""The CPU tier through the whole engine: texts are those of transformers, from a device cache too small for them."""

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.platforms import cpu_cgroup, cpu_facts
from quire.platforms.defaults import default_offloading_gib
from quire.platforms.host_claims import HostClaims
from tests.tiny_models import make_reference

NUM_TOKENS = 24
LENGTHS = (5, 33, 50, 64, 100)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 20, "kv_offloading_size": 0.01}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return {
        family: make_reference(family, tmp_path_factory.mktemp(family), LENGTHS, NUM_TOKENS)
        for family in ("llama", "gemma3")
    }


@pytest.fixture(scope="module")
def reference(references):
    return references["llama"]


def engine(reference, **arguments):
    return LLM(reference.path, skip_tokenizer_init=True, **{**SMALL, **arguments})


def core_of(llm):
    return llm.llm_engine.client.core


def tier_of(llm):
    (tier,) = core_of(llm).scheduler.transfers.connectors
    return tier


def check_nothing_is_held(llm):
    core = core_of(llm)
    while core.has_unfinished():
        core.step()
    assert core.scheduler.kv.pool.num_free == core.num_blocks
    assert tier_of(llm).index.num_busy == 0


def generate(llm, reference, params=GREEDY):
    outputs = llm.generate(reference.prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == reference.token_ids
    return [o.num_cached_tokens for o in outputs]


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("llama", {"async_scheduling": False}),
        ("llama", {"async_depth": 1, "kv_offloading_policy": "arc"}),
        ("llama", {"max_num_batched_tokens": 24}),
        ("llama", {"distributed_executor_backend": "tests.executor.threads:ThreadsExecutor"}),
        ("gemma3", {"num_gpu_blocks_override": 36, "async_scheduling": False}),
        ("gemma3", {"num_gpu_blocks_override": 36, "async_depth": 2, "max_num_batched_tokens": 24}),
    ],
)
def test_texts_are_those_of_an_engine_with_room(references, family, arguments):
    """All requests at once do not fit: those that are preempted get their blocks back from the tier."""
    reference = references[family]
    with engine(reference, **arguments) as llm:
        generate(llm, reference)
        stats = tier_of(llm).stats()
        preempted = core_of(llm).scheduler.num_preemptions > 0
        assert preempted or family == "gemma3"
        assert (stats.restored > 0) == preempted
        assert generate(llm, reference) == [(len(prompt) - 1) // 16 * 16 for prompt in reference.prompts]
        assert stats.dropped_blocks == {} and stats.waits == 0
        assert stats.saved_bytes > 0 and stats.loaded_bytes > 0 and stats.load_seconds > 0
        check_nothing_is_held(llm)


THREADED = {
    "kv_connector": "tests.kv_offload.threaded_tier:threaded_tier",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 10 << 20},
}


@pytest.mark.parametrize(("family", "depth", "num_blocks"), [("llama", 1, 20), ("gemma3", 2, 36)])
def test_texts_with_copies_that_overlap_steps(references, family, depth, num_blocks):
    """As on a GPU; what is in flight when its turn comes is waited for or dropped, and counted."""
    reference, options = references[family], {"num_gpu_blocks_override": num_blocks, "async_depth": depth}
    with engine(reference, kv_offloading_size=None, kv_transfer_config=THREADED, **options) as llm:
        for _ in range(3):
            generate(llm, reference)
        stats = tier_of(llm).stats()
        assert stats.hits > 0 and stats.loaded_blocks > 0 and stats.loaded_bytes > 0
        copier = core_of(llm).executor.worker.runner.transfers.connectors[0].copier
        copier.drain()
        generate(llm, reference)
        copier.drain()
        for report in core_of(llm).executor.worker.runner.transfers.get_finished()[0].reports:
            tier_of(llm).worker_reported(report)
        check_nothing_is_held(llm)


def test_copies_end_before_the_memory_is_freed(reference):
    options = {"kv_offloading_size": None, "kv_transfer_config": THREADED, "num_gpu_blocks_override": 400}
    with engine(reference, **options) as llm:
        copier = core_of(llm).executor.worker.runner.transfers.connectors[0].copier
        copier.gate.clear()
        generate(llm, reference)
        saves = [future for _, future in copier._unreported]
        assert not any(future.done() for future in saves) and saves
    assert all(future.done() for future in saves)


def test_a_request_that_waits_for_its_blocks_does_not_hold_up_others(reference):
    options = {"kv_offloading_size": None, "kv_transfer_config": THREADED, "num_gpu_blocks_override": 16}
    with engine(reference, **options) as llm:
        generate(llm, reference)
        copier = core_of(llm).executor.worker.runner.transfers.connectors[0].copier
        copier.drain()
        llm.generate([[9, 8, 7]], GREEDY, use_tqdm=False)  # whose results say so
        copier.gate.clear()
        loads = llm.llm_engine
        loads.add_request("loads", reference.prompts[1], GREEDY)
        loads.add_request("runs", [3, 4, 5], GREEDY)
        finished = {}
        while loads.has_unfinished_requests():
            finished |= {output.request_id: output for output in loads.step() if output.finished}
            if "runs" in finished:
                assert copier.gate.is_set() or "loads" not in finished
                copier.gate.set()
        assert finished["loads"].outputs[0].token_ids == reference.token_ids[1]
        assert finished["loads"].num_cached_tokens == 32


def test_hits_by_tier_are_those_of_the_script(reference):
    """Chats one after the other, each of which evicts the one before: the second turns find the first ones in the tier,
    but for the last block, which was not full, and the token that is always computed."""
    with engine(reference, num_gpu_blocks_override=8) as llm:
        expected = 0
        for prompt in reference.prompts:
            llm.generate([prompt], GREEDY, use_tqdm=False)
        for prompt, text in zip(reference.prompts[:4], reference.token_ids, strict=False):
            (output,) = llm.generate([[*prompt, *text, 7]], SamplingParams(max_tokens=1), use_tqdm=False)
            found = (len(prompt) + NUM_TOKENS - 1) // 16 * 16
            assert output.num_cached_tokens == found
            expected += found
        stats = llm.llm_engine.client.core.scheduler.stats()
        assert stats.tiers[0].hits == stats.external_cache_hits == expected
        assert stats.prefix_cache_hits == 0 and stats.tiers[0].dropped_blocks == {}
        assert stats.tiers[0].loaded_blocks == expected // 16
        (hits,) = (metric for metric in llm.get_metrics() if metric.name == "quire:kv_tier_hits")
        assert hits.value == expected and hits.labels["tier"] == "cpu"
        check_nothing_is_held(llm)


def test_completions_that_share_a_prompt_and_aborts(reference):
    params = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    with engine(reference, num_gpu_blocks_override=400, kv_offloading_size=0) as llm:
        expected = [o.outputs for o in llm.generate(reference.prompts, params, use_tqdm=False)]
    with engine(reference) as llm:
        for _ in range(2):
            outputs = llm.generate(reference.prompts, params, use_tqdm=False)
            texts = [[one.token_ids for one in o.outputs] for o in outputs]
            assert texts == [[one.token_ids for one in parts] for parts in expected]
        for i, prompt in enumerate(reference.prompts):
            llm.llm_engine.add_request(str(i), prompt, params)
            llm.llm_engine.step()
        llm.llm_engine.abort_request([str(i) for i in range(len(reference.prompts))])
        generate(llm, reference)
        check_nothing_is_held(llm)


def test_content_goes_with_the_prefix_cache_and_with_failed_steps(reference, monkeypatch):
    with engine(reference) as llm:
        generate(llm, reference)
        llm.reset_prefix_cache()
        assert len(tier_of(llm).index) == 0
        assert sum(generate(llm, reference)) == 0
        runner = core_of(llm).executor.worker.runner
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_forward", lambda step: 1 / 0)
            (output, *_) = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
            assert "division" in output.error
        assert len(tier_of(llm).index) == 0
        generate(llm, reference)
        check_nothing_is_held(llm)


def test_a_failed_copy_ends_requests_of_its_step_and_nothing_else(reference, monkeypatch):
    with engine(reference) as llm:
        generate(llm, reference)
        copier = core_of(llm).executor.worker.runner.transfers.connectors[0].copier
        with monkeypatch.context() as patch:
            patch.setattr(copier, "load", lambda job: 1 / 0)
            outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
            assert any("division" in (output.error or "") for output in outputs)
        generate(llm, reference)
        check_nothing_is_held(llm)


@pytest.mark.parametrize(("free", "size"), [(4, 0.0), (20, 6.0), (1000, 64.0)])
def test_the_default_on_a_gpu_is_a_part_of_what_is_free(monkeypatch, tmp_path, free, size):
    monkeypatch.setattr(cpu_facts, "machine_memory", lambda: free << 30)
    monkeypatch.setattr(cpu_cgroup, "memory_left", lambda: None)
    assert default_offloading_gib(HostClaims(tmp_path / "claims")) == pytest.approx(size)


def test_it_is_vllms_connector_too(reference):
    extra = {"cpu_bytes_to_use": 1 << 20, "eviction_policy": "arc", "block_size": 64}
    given = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    with engine(reference, kv_offloading_size=None, kv_transfer_config=given) as llm:
        generate(llm, reference)
        assert tier_of(llm).stats().capacity == (1 << 20) // (2 * 2 * 16 * 16 * 4 * 4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kv_offloading_size": -1}, "kv_offloading_size"),
        ({"kv_offloading_size": float("inf")}, "between 0 and"),
        ({"kv_offloading_path": "/tmp/kv", "kv_offloading_disk_size": 1e300}, "kv_offloading_disk_size is 1e\\+300"),
        (
            {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {}}},
            "MultiConnector has no connectors",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "SharedStorageConnector",
                    "kv_connector_extra_config": {"shared_storage_path": "/tmp/kv", "num_threads": 1e9},
                }
            },
            "num_threads is 1000000000.0; it must be a number between 1 and 256",
        ),
        ({"kv_offloading_size": 1e-6}, "a block has"),
        ({"kv_offloading_size": 1e6}, "of host memory are free"),
        ({"kv_offloading_policy": "fifo"}, "lru, arc"),
        ({"kv_offloading_backend": "lmcache"}, "not available yet: LMCache.*allowed: native"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching must be on"),
        ({"kv_offloading_size": None, "kv_connector": "OffloadingConnector"}, "cpu_bytes_to_use is None"),
        (
            {
                "kv_offloading_size": None,
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20, "num_cpu_blocks": 4},
                },
            },
            "allowed: cpu_bytes_to_use, eviction_policy",
        ),
    ],
)
def test_wrong_options_are_named(reference, arguments, error):
    with pytest.raises(ValueError, match=error):
        engine(reference, **arguments)


@pytest.mark.parametrize("password", ["secret", "se@cret"])
def test_errors_do_not_show_passwords(password):
    url = f"redis://user:{password}@host:6379/0"
    for given in (
        {"kv_conector": "RedisConnector", "kv_connector_extra_config": {"url": url}},
        {"kv_connector": "RedisConnector", "kv_connector_extra_config": [url]},
        [url],
    ):
        with pytest.raises(ValueError, match="hidden@host") as error:
            EngineConfig.from_kwargs(kv_transfer_config=given)
        assert "cret" not in str(error.value)
