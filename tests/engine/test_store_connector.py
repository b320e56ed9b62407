"""KV-cache blocks in stores, through the whole engine."""

import itertools
import shutil
import threading
from dataclasses import replace

import pytest

from quire import LLM, SamplingParams
from quire.distributed.kv_offload.block_file import SECTOR
from quire.distributed.kv_offload.folder_upkeep import block_files
from quire.distributed.kv_offload.store_metadata import StoreMetadata
from tests.distributed.redis_server import redis_server  # noqa: F401 - a fixture
from tests.tiny_models import NUM_TOKENS, make_reference

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def reference(request, tmp_path_factory):
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_reference("llama", tmp_path_factory.mktemp("llama"))


def engine(reference, folder, **arguments):
    arguments = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 25} | arguments
    path = None if folder is None else str(folder)
    return LLM(reference.path, skip_tokenizer_init=True, kv_offloading_path=path, **arguments)


def depth_of(depth):
    return {"async_scheduling": False} if depth == "sync" else {"async_depth": depth}


def core_of(llm):
    return llm.llm_engine.client.core


def generate(llm, reference):
    """The number of cached tokens of each prompt; texts must be right, and nothing may be held at the end."""
    outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == reference.token_ids
    core = core_of(llm)
    while core.has_unfinished():
        core.step()
    pool = core.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks
    return [o.num_cached_tokens for o in outputs]


def tier(llm):
    return core_of(llm).scheduler.transfers.connectors[-1]


def all_but_the_last(reference, llm):
    size = core_of(llm).scheduler.kv.alignment
    return [(len(prompt) - 1) // size * size for prompt in reference.prompts]


@pytest.mark.parametrize("depth", ["sync", 2])
def test_a_restarted_engine_finds_what_the_last_has_computed(reference, tmp_path, depth):
    with engine(reference, tmp_path, **depth_of(depth)) as llm:
        assert generate(llm, reference) == [0] * 8
    with engine(reference, tmp_path, **depth_of(depth)) as llm:
        assert generate(llm, reference) == all_but_the_last(reference, llm)
        stats = tier(llm).stats()
        assert stats.hits == sum(all_but_the_last(reference, llm)) and stats.loaded_blocks > 0
        assert stats.dropped_blocks == {"busy": 0, "evicted": 0} and not any(stats.errors.values())


def test_nothing_but_blocks_stays_in_the_folder(llama, tmp_path):
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)
        worker = core_of(llm).executor.worker.runner.transfers.connectors[-1]
    files = list(block_files(tmp_path))
    assert len(files) == worker._store.stats.writes.hits > 0
    assert sum(1 for path in tmp_path.rglob("*") if path.is_file()) == len(files)
    assert all(size % SECTOR == 0 for _, size, _ in files)


def test_damaged_blocks_are_computed_again(llama, tmp_path):
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)
    files = sorted(path for _, _, path in block_files(tmp_path))
    for path in files[::3]:
        with open(path, "r+b") as file:
            file.seek(50)
            file.write(b"damaged")
    with engine(llama, tmp_path) as llm:
        cached = generate(llm, llama)
        assert any(count < most for count, most in zip(cached, all_but_the_last(llama, llm), strict=True))
        assert tier(llm).stats().errors["load"] > 0
    with engine(llama, tmp_path) as llm:  # they were written again
        assert generate(llm, llama) == all_but_the_last(llama, llm)


def test_a_load_that_fails_may_end_its_request(llama, tmp_path):
    """kv_load_failure_policy as vLLM has it; and a store is a connector like any other."""
    options = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)
    for _, _, path in block_files(tmp_path):
        with open(path, "r+b") as file:
            file.write(b"damaged")
    with engine(llama, None, kv_transfer_config=options) as llm:
        outputs = llm.generate(llama.prompts, GREEDY, use_tqdm=False)
        errors = [output.error for output in outputs if output.outputs[0].finish_reason == "error"]
        assert errors and all("no longer has all of its blocks" in error for error in errors)
        assert generate(llm, llama) == [0] * 8  # what was damaged is gone


def test_others_run_while_a_store_is_slow(llama, tmp_path):
    """A lookup that takes its time keeps neither the scheduler nor other requests waiting."""
    with engine(llama, tmp_path) as llm:
        connector, gate = tier(llm), threading.Event()
        contains = connector._store.contains
        connector._store.contains = lambda keys: gate.wait(60) and contains(keys)
        core, long, short = core_of(llm), llama.prompts[-1], [5, 6, 7]
        llm.llm_engine.add_request("looked up", {"prompt_token_ids": long}, GREEDY)
        llm.llm_engine.add_request("short", {"prompt_token_ids": short}, GREEDY)
        ended = []
        while not ended:
            ended = [output.request_id for output in llm.llm_engine.step() if output.finished]
        assert ended == ["short"] and list(core.scheduler.transfers.looking_up) == ["looked up"]
        llm.llm_engine.add_request("aborted", {"prompt_token_ids": long}, GREEDY)
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["aborted"])
        gate.set()
        while not ended or "looked up" not in ended:
            ended = [output.request_id for output in llm.llm_engine.step() if output.finished]
        assert not core.scheduler.transfers.looking_up and not connector._lookups and not connector._answers.by_request


def test_an_answer_that_nobody_needs_any_more_is_not_kept(llama, tmp_path):
    """While a lookup takes its time, another request computes the same prefix."""
    with engine(llama, tmp_path) as llm:
        connector, gate, calls = tier(llm), threading.Event(), itertools.count()
        contains = connector._store.contains
        connector._store.contains = lambda keys: (next(calls) == 0 or gate.wait(60)) and contains(keys)
        for name in ("one", "the same"):
            llm.llm_engine.add_request(name, {"prompt_token_ids": llama.prompts[-1]}, GREEDY)
        ended = []
        while len(ended) < 2:
            ended += [output.request_id for output in llm.llm_engine.step() if output.finished]
            if ended:
                gate.set()
        assert not connector._lookups and not connector._answers.by_request


def test_a_folder_that_hangs_is_a_miss(llama, tmp_path):
    """As a network mount whose server is gone: requests compute, and later ones do not even ask."""
    with engine(llama, tmp_path) as llm:
        connector, gate = tier(llm), threading.Event()
        connector._deadlines.seconds = 0.05
        connector._store.contains = lambda keys: gate.wait(60) and [False] * len(keys)
        assert generate(llm, llama) == [0] * 8
        assert connector.stats().errors["lookup"] > 0
        while not connector._breaker.is_open:  # its threads may have begun late
            llm.reset_prefix_cache()
            assert generate(llm, llama) == [0] * 8
        gate.set()


def test_loads_of_a_connector_that_raises_are_not_written_later(llama, tmp_path):
    """Their blocks are freed, and may be others'."""
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)
    with engine(llama, tmp_path, async_scheduling=False) as llm:
        worker, reading, gate = core_of(llm).executor.worker.runner.transfers.connectors[-1], *_events()
        get, written = worker._store.get, []
        worker._store.get = lambda *a: reading.set() or (gate.wait(60) and get(*a))
        worker._writer.write = lambda *a: written.append(a)
        prompt = max(llama.prompts, key=len)
        llm.llm_engine.add_request("loads", {"prompt_token_ids": prompt}, GREEDY)
        while not reading.is_set():
            llm.llm_engine.step()
        worker._save = lambda job: 1 / 0
        with pytest.raises(ZeroDivisionError):
            worker.start_load_kv(StoreMetadata(saves=[None]))
        gate.set()
        worker._pool.close()
        assert not written and not worker._received and not worker._loads
        llm.llm_engine.abort_request(["loads"])


def _events():
    return threading.Event(), threading.Event()


def test_a_reset_cache_is_not_found_again(llama, tmp_path):
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)
        llm.reset_prefix_cache()
        assert generate(llm, llama) == [0] * 8


def test_a_failed_step_leaves_nothing_in_the_store(llama, tmp_path):
    """Blocks of a plan are written when its results are known; the plan behind a failed one is not trusted either."""
    with engine(llama, tmp_path, async_depth=2) as llm:
        runner, failures = core_of(llm).executor.worker.runner, iter([False, True])
        forward = runner._forward

        def fail_second(step):
            if next(failures, False):
                raise RuntimeError("out of memory")
            forward(step)

        runner._forward = fail_second
        outputs = llm.generate(llama.prompts, GREEDY, use_tqdm=False)
        assert any(output.outputs[0].finish_reason == "error" for output in outputs)
        runner._forward = forward
        core = core_of(llm)
        while core.has_unfinished():
            core.step()
        assert not core.scheduler.transfers.connectors[-1]._queue
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)


def test_a_device_cache_too_small_for_the_traffic(reference, tmp_path):
    sizes = {"num_gpu_blocks_override": 21 * reference.num_groups, "kv_cache_memory_bytes": None}
    with engine(reference, tmp_path, **sizes) as llm:
        for _ in range(2):
            cached = generate(llm, reference)
        stats = tier(llm).stats()
        assert sum(cached) > 0 and stats.hits > 0 and not any(stats.errors.values())


def test_copies_that_overlap_steps(reference, tmp_path):
    """As on a GPU: a plan that overwrites a block which is being copied waits for that."""
    name = "tests.kv_offload.threaded_tier:threaded_store"
    options = {"kv_connector": name, "kv_connector_extra_config": {"folder": str(tmp_path)}}
    sizes = {"num_gpu_blocks_override": 21 * reference.num_groups, "kv_cache_memory_bytes": None}
    with engine(reference, None, kv_transfer_config=options, **sizes) as llm:
        for _ in range(2):
            generate(llm, reference)
        assert tier(llm).stats().hits > 0 and not any(tier(llm).stats().errors.values())


def test_blocks_that_are_being_saved_are_not_overwritten_after_a_reset(llama, tmp_path):
    """Whoever has them next waits for the copy, or the store would have a block of other content under its name."""
    given = {
        "kv_connector": "tests.kv_offload.threaded_tier:threaded_store",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    prompts = [[7 + i, *range(20, 100)] for i in range(4)]
    with engine(llama, None, kv_transfer_config=given, kv_cache_memory_bytes=None, num_gpu_blocks_override=20) as llm:
        copier = core_of(llm).executor.worker.runner.transfers.connectors[0]._copier
        copier.gate.clear()
        (expected,) = llm.generate([prompts[0]], GREEDY, use_tqdm=False)
        core = core_of(llm)
        while core.has_unfinished():
            core.step()
        assert tier(llm)._saving, "copies have not begun"
        llm.reset_prefix_cache()
        llm.generate(prompts[1:], GREEDY, use_tqdm=False)
        copier.gate.set()
    with engine(llama, None, kv_transfer_config=given) as llm:
        (found,) = llm.generate([prompts[0]], GREEDY, use_tqdm=False)
        assert found.num_cached_tokens == 80
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_connector": "SharedStorageConnector"}, "shared_storage_path is None"),
        ({"kv_connector": "RedisConnector"}, "redis://host"),
        ({"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"folder": "x"}}, "allowed: shared_storage"),
        ({"kv_connector": "noop", "kv_load_failure_policy": "ignore"}, "allowed: recompute, fail"),
    ],
)
def test_wrong_options(llama, options, message):
    with pytest.raises(ValueError, match=message):
        engine(llama, None, kv_transfer_config=options)


def test_hashes_must_be_those_of_other_processes(llama, tmp_path):
    with pytest.raises(ValueError, match="must be sha256"):
        engine(llama, tmp_path, prefix_caching_hash_algo="xxhash")


def test_other_weights_under_the_same_name_share_nothing(llama, tmp_path):
    with engine(llama, tmp_path / "kv") as llm:
        generate(llm, llama)
    copy = tmp_path / "model"
    shutil.copytree(llama.path, copy)
    with engine(replace(llama, path=str(copy)), tmp_path / "kv") as llm:
        assert sum(generate(llm, llama)) > 0  # a copy, with its times
    (weights,) = copy.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\0\0\0\0"
    weights.write_bytes(content)
    with engine(replace(llama, path=str(copy)), tmp_path / "kv") as llm:
        outputs = llm.generate(llama.prompts, GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0] * 8


def redis_engine(reference, server, **arguments):
    options = {
        "kv_connector": "RedisConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": server.url, "timeout": 0.2},
    }
    return engine(reference, None, kv_transfer_config=options, **arguments)


def test_two_engines_share_prefixes_through_redis(llama, redis_server):  # noqa: F811
    with redis_engine(llama, redis_server) as first, redis_engine(llama, redis_server) as second:
        assert generate(first, llama) == [0] * 8
        tier(first).close()
        core_of(first).executor.worker.runner.transfers.connectors[-1]._pool.close()  # all is written
        assert generate(second, llama) == all_but_the_last(llama, second)
        assert tier(second).stats().tier == "redis"


def test_redis_comes_and_goes_under_load(llama, redis_server):  # noqa: F811
    """Stopped, started, full, slow: every text is right, and nothing is held at the end."""
    sizes = {"num_gpu_blocks_override": 21, "kv_cache_memory_bytes": None}
    with redis_engine(llama, redis_server, **sizes) as llm:
        generate(llm, llama)
        redis_server.stop()
        generate(llm, llama)
        redis_server.start("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
        generate(llm, llama)
        redis_server.client.client_pause(60_000, all=True)
        generate(llm, llama)
        stats = tier(llm).stats()
        assert stats.errors["lookup"] + stats.errors["load"] + stats.errors["save"] > 0
