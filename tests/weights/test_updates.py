"""New weights in a running engine: texts are those of an engine that was started with them."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm_engine import LLMEngine
from quire.messages.sampling_params import RequestOutputKind
from quire.weights.in_place import replacements
from tests.weights.models import ENGINE, GREEDY, PROMPTS, state_of, tokens, tokens_of, two_models

FAMILIES = [
    ("llama", {"dtype": "float32"}),  # read into the model's own parameters; a tied head
    ("llama", {"dtype": "bfloat16"}),  # packed
    ("qwen3", {"dtype": "bfloat16"}),
    ("mixtral", {"dtype": "bfloat16"}),
    ("deepseek-v3", {"dtype": "bfloat16"}),  # whose attention holds a weight in its backend's form
    ("llama", {"dtype": "bfloat16", "quantization": "int8"}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_texts_are_those_of_an_engine_started_with_the_weights(family, options):
    old, new = two_models(family)
    assert tokens_of(old, **options) != tokens_of(new, **options)
    with LLM(old, **ENGINE, **options) as llm:
        assert tokens(llm) == tokens_of(old, **options)
        llm.update_weights(new, weight_version="step 1")
        assert tokens(llm) == tokens_of(new, **options) and llm.get_weight_version() == "step 1"
        llm.update_weights(state_of(old))
        assert tokens(llm) == tokens_of(old, **options) and llm.get_weight_version() == "step 1"


def test_each_rank_takes_its_slice():
    old, new = two_models("qwen3")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "tests.executor.threads:ThreadsExecutor"}
    with LLM(old, dtype="float32", **ENGINE, **ranks) as llm:
        assert tokens(llm) == tokens_of(old, dtype="float32")
        llm.update_weights(state_of(new))
        assert tokens(llm) == tokens_of(new, dtype="float32")


def test_cached_prefixes_are_forgotten():
    old, new = two_models("llama")
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(old, dtype="float32", **ENGINE) as llm:

        def num_cached() -> int:
            return llm.generate(PROMPTS[2], params, use_tqdm=False)[0].num_cached_tokens

        assert [num_cached(), num_cached()] == [0, 48]
        llm.update_weights(new)
        assert [num_cached(), num_cached()] == [0, 48]
        llm.update_weights(old)
        assert num_cached() == 0


class Foreign(torch.Tensor):
    """Without values of its own, and not to be copied to tensors that have some."""

    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        if operation is not torch.ops.aten.detach.default:
            raise RuntimeError("got mixed tensors")
        return cls(args[0].held)


class Sharded(Foreign):
    """As a trainer's, which is split among its ranks."""

    def full_tensor(self):
        return self.held


@pytest.mark.parametrize("processes", [False, True])
def test_tensors_of_a_trainers_ranks_are_gathered(processes, monkeypatch):
    old, new = two_models("llama")
    monkeypatch.setattr(LLMEngine, "_weights_at_hand", not processes)
    with LLM(old, dtype="float32", **ENGINE) as llm:
        llm.update_weights({name: Sharded(tensor) for name, tensor in state_of(new).items()})
        assert tokens(llm) == tokens_of(new, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_update_names_the_tensor_and_changes_nothing(dtype):
    old, new = two_models("llama")
    state, name = state_of(new), "model.layers.2.mlp.down_proj.weight"
    with LLM(old, dtype=dtype, **ENGINE) as llm:

        def refused(weights, why, **options) -> None:
            with pytest.raises(ValueError, match=why):
                llm.update_weights(weights, **options)
            assert not llm.is_paused() and tokens(llm) == tokens_of(old, dtype=dtype)

        refused({n: tensor for n, tensor in state.items() if n != name}, f"lacks {name}")
        refused(state | {name: torch.zeros(3, 4)}, rf"{name} has shape \[3, 4\].*specifies \[64, 96\]")
        refused(state | {"model.bogus": torch.zeros(1)}, "unknown model.bogus")
        refused(state | {"lm_head.weight": torch.zeros(211, 64)}, r"lm_head\.weight differs from the embedding")
        refused(state | {"model.norm.weight": 3}, "model.norm.weight': int; they must be tensors")
        norm = state["model.norm.weight"]
        for broken in (norm.to("meta"), norm.to_sparse(), Foreign(norm)):
            refused(state | {"model.norm.weight": broken}, "model.norm.weight is a .* must be a plain tensor")
        refused(state, "weight_version is 3; it must be a string", weight_version=3)
        refused("/no/such/folder", "must be a folder with a checkpoint")
        refused(7, "must be a checkpoint's path, a dict of tensors")
        refused({"update_info": {"path": new}}, "no update of weights has been started")
        with pytest.raises(ValueError, match="draft model are not available yet"):
            llm.start_draft_weight_update()
        llm.update_weights(state)  # nothing is left of those
        assert tokens(llm) == tokens_of(new, dtype=dtype)


def test_an_update_in_parts_through_shared_memory():
    old, new = two_models("llama")
    state = state_of(new)
    names = list(state)
    file = Path("/dev/shm") / f"quire-test-{os.getpid()}"
    try:
        save_file({name: state[name] for name in names[:20]}, file)
        with LLM(old, dtype="float32", **ENGINE) as llm:
            llm.start_weight_update()
            llm.update_weights({"update_info": {"shared_memory": file.name}})
            assert tokens(llm) == tokens_of(old, dtype="float32")  # until all are there
            llm.update_weights({"update_info": [{"tensors": {name: state[name] for name in names[20:]}}]})
            llm.finish_weight_update("v2")
            assert tokens(llm) == tokens_of(new, dtype="float32")
            llm.start_weight_update()
            with pytest.raises(ValueError, match="an update of weights is under way"):
                llm.start_weight_update()
            for info in ({"shared_memory": "../x"}, {"shared_memory": "not-there"}, {"descriptor": [1]}, {"what": 1}):
                with pytest.raises(ValueError, match="update_info"):
                    llm.update_weights({"update_info": info})
                llm.start_weight_update()  # an error ends it
    finally:
        file.unlink(missing_ok=True)


def in_process(scenario, folder: str, **arguments) -> None:
    async def main() -> None:
        engine = AsyncLLM(EngineConfig.from_kwargs(model=folder, dtype="float32", **ENGINE, **arguments))
        try:
            await asyncio.wait_for(scenario(engine), 120)
        finally:
            engine.shutdown()

    asyncio.run(main())


LONG = SamplingParams(temperature=0, max_tokens=200, output_kind=RequestOutputKind.DELTA)


class Running:
    """A request whose tokens are read in the background."""

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine, name))

    async def _read(self, engine: AsyncLLM, name: str) -> None:
        async for output in engine.generate(PROMPTS[1], LONG, name):
            self.tokens += output.outputs[0].token_ids
            self.reason = output.outputs[0].finish_reason
            self.begun.set()


def continued(folder: str, generated: list[int]) -> list[int]:
    prompt = {"prompt_token_ids": PROMPTS[1]["prompt_token_ids"] + generated}
    params = SamplingParams(temperature=0, max_tokens=LONG.max_tokens - len(generated))
    with LLM(folder, dtype="float32", **ENGINE) as llm:
        return list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)


def test_requests_that_run_are_kept_and_go_on_with_the_new_weights():
    old, new = two_models("llama")

    async def scenario(engine: AsyncLLM) -> None:
        running = Running(engine, "a")
        await running.begun.wait()
        await engine.pause_generation(mode="keep", clear_cache=False)
        late = Running(engine, "late")  # held until the engine goes on
        await engine.update_weights(state_of(new), weight_version="v1")
        assert await engine.is_paused() and await engine.get_weight_version() == "v1"
        before = list(running.tokens)
        await engine.resume_generation()
        await asyncio.gather(running.task, late.task)
        assert len(running.tokens) == LONG.max_tokens and late.tokens == continued(new, [])
        # Some tokens of the old weights may have been on their way.
        of_old = continued(old, [])
        count = next(i for i, (a, b) in enumerate(zip(running.tokens, of_old, strict=True)) if a != b)
        assert count >= len(before)
        changed = range(len(before), count + 1)
        assert any(running.tokens[at:] == continued(new, running.tokens[:at]) for at in changed)

    in_process(scenario, old)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_that_run_are_finished_or_aborted_as_asked(mode):
    old, new = two_models("llama")

    async def scenario(engine: AsyncLLM) -> None:
        running = Running(engine, "a")
        await running.begun.wait()
        await engine.update_weights(new, mode=mode)
        await running.task
        if mode == "wait":
            assert (running.tokens, running.reason) == (continued(old, []), "length")
        else:
            assert running.reason == "abort" and len(running.tokens) < LONG.max_tokens
        after = Running(engine, "b")
        await after.task
        assert after.tokens == continued(new, [])
        with pytest.raises(ValueError, match="mode is 'now'; allowed: abort, wait, keep"):
            await engine.update_weights(new, mode="now")
        with pytest.raises(ValueError, match="must be a folder"):
            await engine.update_weights("/no/such/folder")

    in_process(scenario, old)


def test_a_held_request_can_be_aborted():
    old, _ = two_models("llama")

    async def scenario(engine: AsyncLLM) -> None:
        await engine.pause_generation()
        held = Running(engine, "a")
        await asyncio.sleep(0)
        await engine.abort("a")
        await held.task
        await engine.resume_generation()
        assert held.reason == "abort" and (await engine.get_state())["core"]["requests"] == 0

    in_process(scenario, old)


def test_offline_requests_wait_too():
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", **ENGINE) as llm:
        ids = llm.enqueue(PROMPTS, GREEDY)
        llm.pause_generation(mode="keep")
        with pytest.raises(RuntimeError, match="paused or asleep"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.resume_generation()
        found = {output.request_id: list(output.outputs[0].token_ids) for output in llm.wait_for_completion()}
        assert [found[i] for i in ids] == tokens_of(old, dtype="float32")


def test_weights_of_another_kind_do_not_fit():
    used = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"weight: it is \[3, 2\].* in the model in use and \[4, 2\]"):
        replacements(used, torch.nn.Linear(2, 4))
    changed = torch.nn.Linear(2, 3)
    used.rounding, changed.rounding = 0.5, 0.25
    with pytest.raises(ValueError, match=r"rounding: it is 0\.5 in the model in use and 0\.25"):
        replacements(used, changed)


def test_weights_that_are_mapped_stay(tmp_path):
    old, new = two_models("llama")
    for _ in range(2):  # written, then mapped
        options = {"packed_weights_cache": str(tmp_path), "enable_sleep_mode": True, **ENGINE}
        with LLM(old, dtype="bfloat16", **options) as llm:
            tokens(llm)
            mapped = llm.collective_rpc(lambda worker: worker.model.mapped_bytes)[0] > 0
            if mapped:
                for call in (lambda: llm.update_weights(new), lambda: llm.sleep(level=2)):
                    with pytest.raises(ValueError, match="leave out --packed-weights-cache"):
                        call()
                assert not llm.is_paused()


def scale_norm(worker):
    worker.model.norm.weight.data.mul_(-3)


@pytest.mark.parametrize("change", ["reload_weights", scale_norm])
def test_calls_of_workers_that_may_change_weights_forget_what_was_computed(change, tmp_path):
    """In the device's cache, in the CPU tier, and in a folder."""
    old, new = two_models("llama")
    tiers = {"kv_offloading_size": 0.01, "kv_offloading_path": str(tmp_path / "store")}
    with LLM(old, dtype="float32", **ENGINE, **tiers) as llm:
        if change == "reload_weights":
            llm.update_weights(new, weight_version="1")
        before = tokens(llm)
        ids = llm.enqueue(PROMPTS, GREEDY)  # some run while it is called
        for _ in range(3):
            llm.llm_engine.step()
        llm.collective_rpc(change)
        list(llm.wait_for_completion())
        after = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert ids and [list(output.outputs[0].token_ids) for output in after] != before
        if change == "reload_weights":
            assert tokens(llm) == tokens_of(old, dtype="float32") and llm.get_weight_version() == "default"
        else:
            (tier, folder) = llm.llm_engine.client.core.scheduler.transfers.connectors
            hits = tier.stats().hits + folder.stats().hits
            llm.collective_rpc("describe")  # which only reads
            assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 48
            llm.collective_rpc(scale_norm)
            assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
            assert tier.stats().hits + folder.stats().hits == hits


def test_reloading_another_checkpoint_and_what_is_the_engines_own():
    old, new = two_models("llama")
    with LLM(old, dtype="float32", **ENGINE) as llm:
        assert llm.collective_rpc("reload_weights", kwargs={"weights_path": new}) == [None]
        assert tokens(llm) == tokens_of(new, dtype="float32")
        for method, own in (("sleep", "sleep"), ("update_weights", "update_weights"), ("execute_model", "generate")):
            with pytest.raises(ValueError, match=rf"{method} is the engine's to call.*\({own}\)"):
                llm.collective_rpc(method, args=(2,))
        with pytest.raises(ValueError, match="takes no weights_iterator"):
            llm.collective_rpc("reload_weights", args=([],))
        assert tokens(llm) == tokens_of(new, dtype="float32")


def test_a_store_never_serves_what_other_weights_computed(tmp_path):
    old, new = two_models("llama")
    store = {"dtype": "float32", "kv_offloading_path": str(tmp_path / "store")}
    with LLM(old, **ENGINE, **store) as llm:
        assert tokens(llm) == tokens_of(old, dtype="float32")
    with LLM(old, **ENGINE, **store) as llm:
        found = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
        assert found[0].num_cached_tokens == 48  # from the folder
        llm.update_weights(new)
        assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        assert tokens(llm) == tokens_of(new, dtype="float32")
        llm.update_weights(old)  # not known by its files any more: what it computes has a name of its own
        assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        assert tokens(llm) == tokens_of(old, dtype="float32")
    with LLM(old, **ENGINE, **store) as llm:  # another engine still finds the first one's
        assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens == 48
        assert tokens(llm) == tokens_of(old, dtype="float32")


def test_an_update_is_finished_after_the_engine_woke_up():
    old, new = two_models("llama")
    with LLM(old, dtype="float32", enable_sleep_mode=True, **ENGINE) as llm:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": new}})
        llm.sleep(level=1)
        with pytest.raises(ValueError, match="wake it up first"):
            llm.finish_weight_update()
        with pytest.raises(ValueError, match="wake it up first"):
            llm.collective_rpc("reload_weights")
        llm.wake_up()
        assert tokens(llm) == tokens_of(old, dtype="float32")
        llm.finish_weight_update("2")
        assert tokens(llm) == tokens_of(new, dtype="float32") and llm.get_weight_version() == "2"
        with pytest.raises(ValueError, match="new weights since its start"):
            llm.save_sharded_state("/nowhere")


CALLS = {
    "update": lambda llm, new: llm.update_weights(new),
    "sleep": lambda llm, new: llm.sleep(1, mode="keep"),
    "pause": lambda llm, new: llm.pause_generation(mode="keep"),
}


@pytest.mark.parametrize("call", CALLS)
def test_blocks_on_their_way_are_waited_for_and_nothing_else(call, tmp_path):
    """Requests are kept: those that wait for room do so until the engine goes on."""
    old, new = two_models("llama")
    options = {"kv_offloading_path": str(tmp_path), "enable_sleep_mode": True, "dtype": "float32", **ENGINE}
    with LLM(old, **options) as llm:
        tokens(llm)
    with LLM(old, **options) as llm:
        core, reading, gate = llm.llm_engine.client.core, threading.Event(), threading.Event()
        store, step = core.executor.worker.runner.transfers.connectors[-1]._store, core.step_ahead
        get = store.get
        store.get = lambda *blocks: (reading.set(), gate.wait(60)) and get(*blocks)
        core.step_ahead = lambda *schedules: (gate.set(), step(*schedules))
        loaded = llm.enqueue(PROMPTS[2], GREEDY)
        while not reading.is_set():
            llm.llm_engine.step()
        late = llm.enqueue(PROMPTS[1], GREEDY)
        CALLS[call](llm, new)
        assert not core.scheduler.transfers.moving and not len(core.scheduler.running)
        llm.wake_up()
        found = {output.request_id: list(output.outputs[0].token_ids) for output in llm.wait_for_completion()}
        expected = tokens_of(new if call == "update" else old, dtype="float32")
        assert [found[i] for i in (*loaded, *late)] == [expected[2], expected[1]]
        assert core.state()["blocks_free"] == core.state()["blocks"]
