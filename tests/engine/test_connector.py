"""KV connectors, through the whole engine."""

import pytest

import tests.engine.host_tier  # noqa: F401 - registers "host"
from quire import LLM, SamplingParams
from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.kernels import native
from quire.messages.kv_transfer import ConnectorMetadata, FinishedTransfers
from tests.engine.memory_connector import MemoryConnector, ThreadedConnector
from tests.tiny_models import NUM_TOKENS, make_reference

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
MEMORY = "tests.engine.memory_connector:"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference("llama", tmp_path_factory.mktemp("llama"))


def engine(reference, **arguments):
    arguments = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 25} | arguments
    return LLM(reference.path, skip_tokenizer_init=True, **arguments)


def core_of(llm):
    return llm.llm_engine.client.core


def drain(llm):
    """Blocks that are still being sent; then all must be free."""
    core = core_of(llm)
    while core.has_unfinished():
        core.step()
    pool = core.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks


def run(reference, **arguments):
    with engine(reference, **arguments) as llm:
        outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == reference.token_ids
        drain(llm)
        return [o.num_cached_tokens for o in outputs]


def loaded(reference):
    """Everything but the last token, which is always computed."""
    return [min(len(prompt) // 16 * 16, len(prompt) - 1) for prompt in reference.prompts]


def test_a_connector_that_does_nothing_changes_nothing(reference):
    assert run(reference, kv_connector="noop") == [0] * 8


@pytest.mark.parametrize("name", ["MemoryConnector", "AsyncMemoryConnector", "ThreadedConnector"])
@pytest.mark.parametrize("depth", [1, 2])
def test_another_engine_loads_what_one_has_saved(reference, name, depth):
    MemoryConnector.store.clear()
    MemoryConnector.layer_calls.clear()
    ThreadedConnector.gate.set()
    settings = {"kv_connector": MEMORY + name, "async_depth": depth}
    assert run(reference, **settings) == [0] * 8
    hooks = {"load", "save"} if name != "ThreadedConnector" else set()
    assert {call for call, _ in MemoryConnector.layer_calls} == hooks
    assert len(MemoryConnector.store) == sum(len(prompt) // 16 for prompt in reference.prompts)
    assert run(reference, **settings) == loaded(reference)


@pytest.mark.parametrize("max_blocks", [1000, 4])
def test_a_host_tier_returns_what_the_cache_evicted(reference, max_blocks):
    """21 blocks hold one request of 164 tokens, so all others are preempted or evicted on the way."""
    options = {"kv_connector": "host", "kv_connector_extra_config": {"max_blocks": max_blocks}}
    sizes = {"num_gpu_blocks_override": 21, "kv_cache_memory_bytes": None}
    with engine(reference, kv_transfer_config=options, **sizes) as llm:
        for _ in range(2):
            outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == reference.token_ids
        tier = core_of(llm).scheduler.transfers.connectors[0]
        assert tier.num_preempted > 0 and len(tier.held) <= max_blocks
        if max_blocks == 1000:
            assert [o.num_cached_tokens for o in outputs] == loaded(reference)
        drain(llm)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(("name", "replayed"), [("host", True), (f"{MEMORY}MemoryConnector", False)])
def test_steps_are_replayed_unless_a_connector_works_by_layer(reference, name, replayed):
    with engine(reference, dtype="bfloat16", kv_connector=name) as llm:
        llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        assert (core_of(llm).executor.worker.runner.recorded.replays > 0) == replayed


@pytest.mark.parametrize("as_list", [True, False])
def test_several_connectors(reference, as_list):
    """One engine's memory and host tier: the first engine fills the memory, the second loads from there."""
    MemoryConnector.store.clear()
    connectors = [
        {"kv_connector": "host", "kv_role": "kv_both"},
        {"kv_connector": "AsyncMemoryConnector", "kv_connector_module_path": "tests.engine.memory_connector"},
    ]
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    settings = {"kv_transfer_config": connectors if as_list else multi}
    assert run(reference, **settings) == [0] * 8
    assert run(reference, **settings) == loaded(reference)


class Witness(KVConnector):
    """Notes how it was built."""

    built: list["Witness"] = []  # noqa: RUF012

    def __init__(self, config, layout, role):
        super().__init__(config, layout, role)
        self.built.append(self)

    def bind(self, kv_caches, notify):
        self.kv_caches = kv_caches


def test_both_sides_are_built_with_their_options_and_the_layout_by_group(tmp_path):
    Witness.built.clear()
    reference = make_reference("qwen2-mixed", tmp_path, lengths=(5,), num_tokens=1)
    name, extra = "tests.engine.test_connector:Witness", {"path": "/tmp"}
    given = {"kv_connector": name, "kv_role": "kv_producer", "engine_id": "e", "kv_connector_extra_config": extra}
    with engine(reference, kv_transfer_config=given) as llm:
        scheduler, worker = Witness.built
        assert (scheduler.role, worker.role) == ("scheduler", "worker")
        assert scheduler.config == worker.config == ConnectorConfig(name, "kv_producer", "e", extra)
        assert scheduler.layout == worker.layout and len(worker.layout.groups) == 2
        pages = core_of(llm).num_blocks + 1
    layers = [layer for group in worker.layout.groups for layer in group.layers]
    assert sorted(layers) == sorted(worker.kv_caches) == [0, 1, 2, 3]
    assert all(len(cache) == pages for cache in worker.kv_caches.values())


def test_an_engine_that_waits_for_a_transfer_makes_no_plans(reference):
    MemoryConnector.store.clear()
    ThreadedConnector.gate.set()
    name = f"{MEMORY}ThreadedConnector"
    run(reference, kv_connector=name)
    ThreadedConnector.gate.clear()
    with engine(reference, kv_connector=name) as llm:
        core, plans = core_of(llm), []
        execute = core.executor.execute_model
        core.executor.execute_model = lambda plan: (plans.append(plan), execute(plan))
        llm.llm_engine.add_request("a", reference.prompts[-1], GREEDY)
        for _ in range(5):
            assert llm.llm_engine.step() == []
        assert [len(plan.rows) for plan in plans] == [0], "one plan starts the load"
        ThreadedConnector.gate.set()
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
        assert outputs[-1].outputs[0].token_ids == reference.token_ids[-1]
        assert sum(len(plan.rows) == 0 for plan in plans) == 2, "and one reads its end"
        drain(llm)


class Broken(KVConnector):
    """Raises in the method named `broken`; otherwise loads and sends asynchronously, without content."""

    broken = ""

    def __init__(self, config, layout, role):
        super().__init__(config, layout, role)
        self.receives, self.sends, self.done = [], [], FinishedTransfers()

    def __getattribute__(self, name):
        if name == Broken.broken:

            def fail(*_):
                raise OSError(f"{name} failed")

            return fail
        return super().__getattribute__(name)

    def get_num_new_matched_tokens(self, request, num_computed):
        return (0 if Broken.broken == "request_finished" else 16), Broken.broken != "start_load_kv"

    def update_state_after_alloc(self, request, block_ids, num_external):
        self.receives.append(request.request_id)

    def request_finished(self, request, block_ids):
        self.sends.append(request.request_id)
        return True

    def build_connector_meta(self, plan):
        meta = BrokenMeta()
        meta.done = FinishedTransfers(tuple(self.sends), tuple(self.receives))
        self.receives, self.sends = [], []
        return meta

    def start_load_kv(self, meta):
        self.done = meta.done

    def get_finished(self):
        done, self.done = self.done, FinishedTransfers()
        return done


class BrokenMeta(ConnectorMetadata):
    pass


@pytest.mark.parametrize(
    ("method", "fails"),
    [
        ("get_num_new_matched_tokens", False),  # computed here
        ("update_state_after_alloc", True),
        ("build_connector_meta", True),
        ("start_load_kv", True),
        ("wait_for_save", True),
        ("get_finished", True),
        ("request_finished", False),
    ],
)
def test_a_connector_that_raises_ends_its_requests_and_not_the_engine(reference, method, fails):
    with engine(reference, kv_connector="tests.engine.test_connector:Broken", max_num_seqs=4) as llm:
        Broken.broken = method
        try:
            outputs = llm.generate(reference.prompts[4:], GREEDY, use_tqdm=False)
        finally:
            Broken.broken = ""
        for output in outputs:
            assert output.outputs[0].finish_reason == ("error" if fails else "length")
            assert not fails or f"{method} failed" in output.error
        Broken.broken = "get_num_new_matched_tokens"  # what it would load has no content
        try:
            (output,) = llm.generate([reference.prompts[4]], GREEDY, use_tqdm=False)
        finally:
            Broken.broken = ""
        assert output.outputs[0].token_ids == reference.token_ids[4]
        drain(llm)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"kv_connector": "nixl"}, "allowed: noop"),
        ({"kv_connector": "no_such_module:Connector"}, "cannot be imported"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "not available yet"),
        ({"kv_transfer_config": {"kv_connector": "noop", "kv_role": "both"}}, "allowed: kv_both"),
        ({"kv_transfer_config": {"kv_connector": "noop", "kv_port": 1}}, "allowed: kv_connector"),
        ({"kv_transfer_config": [3]}, "must be an object"),
        ({"kv_transfer_config": {"kv_connector": "noop"}, "kv_connector": "noop"}, "give one of them"),
    ],
)
def test_unknown_connectors_and_options_are_named(reference, given, error):
    with pytest.raises(ValueError, match=error):
        run(reference, **given)
