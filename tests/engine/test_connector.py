"""KV connector hooks, through the whole engine."""

import pytest

from quire import LLM, SamplingParams
from tests.engine.memory_connector import MemoryConnector
from tests.tiny_models import NUM_TOKENS, make_reference

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference("llama", tmp_path_factory.mktemp("llama"))


def run(reference, connector, **arguments):
    engine = LLM(
        reference.path,
        dtype="float32",
        skip_tokenizer_init=True,
        kv_connector=connector,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 25,
        **arguments,
    )
    with engine as llm:
        outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == reference.token_ids
        core = llm.llm_engine.client.core
        while core.has_unfinished():  # blocks that are still being sent
            core.step()
        pool = core.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks
        return [o.num_cached_tokens for o in outputs]


def test_a_connector_that_does_nothing_changes_nothing(reference):
    assert run(reference, "noop") == [0] * 8


@pytest.mark.parametrize("name", ["MemoryConnector", "AsyncMemoryConnector"])
@pytest.mark.parametrize("depth", [1, 2])
def test_another_engine_loads_what_one_has_saved(reference, name, depth):
    MemoryConnector.store.clear()
    connector = f"tests.engine.memory_connector:{name}"
    assert run(reference, connector, async_depth=depth) == [0] * 8
    assert {call for call, _ in MemoryConnector.layer_calls} == {"load", "save"}
    lengths = [len(prompt) for prompt in reference.prompts]
    assert len(MemoryConnector.store) == sum(n // 16 for n in lengths)
    # Loaded, even with nothing in the second engine's own cache; the last token is always computed.
    assert run(reference, connector, async_depth=depth) == [min(n // 16 * 16, n - 1) for n in lengths]


def test_unknown_connectors_are_named(reference):
    with pytest.raises(ValueError, match="allowed: noop"):
        run(reference, "nixl")
    with pytest.raises(ValueError, match="cannot be imported"):
        run(reference, "no_such_module:Connector")
