"""The engine in its own process."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.async_engine import EngineDeadError, EngineStalledError
from quire.engine.async_llm import AsyncLLM
from quire.engine.engine_connection import EngineChannel, EngineConnection
from quire.engine.input_processor import ParsedPrompt
from quire.engine.resolve_config import resolve_config
from quire.messages.protocol import AddRequests
from quire.messages.requests import ErrorKind
from quire.messages.sampling_params import RepetitionDetection, RequestOutputKind

ARGUMENTS = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 27}
PROMPTS = [f"Question {i}: what is {i} plus {i}? Answer:" for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def start(**arguments) -> AsyncLLM:
    return AsyncLLM(EngineConfig.from_kwargs(**{**ARGUMENTS, **arguments}))


@pytest.fixture(scope="module")
def expected():
    with LLM(**ARGUMENTS) as llm:
        return [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def run(scenario, **arguments):
    """A scenario with its own engine and event loop."""

    async def main():
        engine = start(**arguments)
        try:
            await asyncio.wait_for(scenario(engine), 120)
        finally:
            engine.shutdown()
        assert not engine._connection.host.process.is_alive()
        assert not engine._connection.host.folder.exists()

    asyncio.run(main())


async def text_of(engine, prompt, request_id, params=GREEDY, begun=None):
    """`begun` is an event to set at the first output."""
    text = ""
    async for output in engine.generate(prompt, params, request_id):
        text += output.outputs[0].text
        if begun is not None:
            begun.set()
    return text


async def reading(engine, prompt, request_id, params):
    """A task that reads a stream, after its first output."""
    begun = asyncio.Event()
    task = asyncio.create_task(text_of(engine, prompt, request_id, params, begun))
    await begun.wait()
    return task


async def whole(engine):
    """No request is left and all blocks are free, by the engine's own counts."""
    while engine.stats.num_running or engine.stats.kv_cache_usage:
        await text_of(engine, "x", f"probe {time.monotonic()}", GREEDY.replace(max_tokens=1))
        await asyncio.sleep(0.01)
    assert engine.get_num_unfinished_requests() == 0


def test_streams_equal_the_offline_texts(expected):
    async def scenario(engine):
        texts = await asyncio.gather(*(text_of(engine, p, str(i)) for i, p in enumerate(PROMPTS)))
        assert texts == expected
        outputs = [o async for o in engine.generate(PROMPTS[0], GREEDY.replace(temperature=1.0, n=3, seed=1), "n")]
        assert {part.index for o in outputs for part in o.outputs} == {0, 1, 2} and outputs[-1].finished
        stopped = await text_of(engine, PROMPTS[0], "stop", GREEDY.replace(stop=[expected[0][5:8]]))
        assert stopped == expected[0][: expected[0].index(expected[0][5:8])]
        with pytest.raises(ValueError, match="empty"):
            await text_of(engine, [], "bad")
        assert await engine.reset_prefix_cache()
        await engine.check_health()
        assert {m.name for m in engine.get_metrics()} > {"quire:num_requests_running", "quire:generation_tokens"}

    run(scenario)


def test_leaving_a_stream_aborts_the_request_and_a_slow_reader_gets_merged_deltas(expected):
    async def scenario(engine):
        long = GREEDY.replace(max_tokens=200)
        async for _ in engine.generate(PROMPTS[0], long, "left"):
            break
        (await reading(engine, PROMPTS[1], "cancelled", long)).cancel()
        slow = engine.generate(PROMPTS[2], GREEDY, "slow")
        first = await anext(slow)
        while engine.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        rest = [output async for output in slow]
        assert len(rest) == 1 and rest[0].finished
        assert first.outputs[0].text + rest[0].outputs[0].text == expected[2]
        aborted = await reading(engine, PROMPTS[3], "aborted", long)
        await engine.abort(["aborted", "unknown"])
        text = await aborted
        assert text and (text.startswith(expected[3]) or expected[3].startswith(text))
        await whole(engine)

    run(scenario)


def test_a_killed_engine_is_noticed_and_every_stream_hears_of_it():
    async def scenario(engine):
        long = GREEDY.replace(max_tokens=200)
        streams = await asyncio.gather(*(reading(engine, p, str(i), long) for i, p in enumerate(PROMPTS)))
        os.kill(engine._connection.host.process.pid, signal.SIGKILL)
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) and "killed by SIGKILL" in str(r) for r in results)
        for use in (engine.check_health(), text_of(engine, "x", "late"), engine.reset_prefix_cache()):
            with pytest.raises(EngineDeadError):
                await use

    run(scenario)


def test_a_request_that_cannot_be_sent_leaks_nothing(monkeypatch):
    """Eight of these once filled the admission limit permanently."""

    async def scenario(engine):
        class Interrupted(BaseException):
            pass

        send = engine._connection.send

        def failing(message):
            if isinstance(message, AddRequests):
                raise failure
            send(message)

        monkeypatch.setattr(engine._connection, "send", failing)
        for failure in (OverflowError("too big"), OSError("no room"), Interrupted()):
            with pytest.raises(type(failure)):
                await text_of(engine, "x", "lost", GREEDY.replace(n=3, temperature=1.0))
            assert engine.get_num_unfinished_requests() == engine.get_num_unfinished_sequences() == 0
        monkeypatch.undo()
        unsent = SamplingParams(max_tokens=1)
        unsent.repetition_detection = RepetitionDetection(max_pattern_size=2)
        unsent.repetition_detection.min_count = 2**70
        with pytest.raises(OverflowError):
            await text_of(engine, "x", "unsent", unsent)
        for prompt in ([2**70], {"prompt_token_ids": [1, 2**64]}, ParsedPrompt(None, [-(2**70)])):
            with pytest.raises(ValueError, match="the prompt has token id a number of"):
                await text_of(engine, prompt, "large")
        for salt, wrong in (("x" * 2000, "at most 1024"), ("\ud800", "surrogate")):
            with pytest.raises(ValueError, match=f"^cache_salt .*{wrong}"):
                await text_of(engine, ParsedPrompt(None, [1], salt), "salted")
        for priority in (2**70, "high", True):
            with pytest.raises(ValueError, match=r"^priority is"):
                async for _ in engine.generate("x", GREEDY, "first", priority=priority):
                    pass
        with pytest.raises(ValueError, match=r"^request_id"):
            await text_of(engine, "x", "\ud800")
        state = await engine.get_state()
        assert state["front_end"] == {"requests": 0, "streams": 0, "calls": 0} and not state["core"]["requests"]
        sampled = GREEDY.replace(n=5, temperature=1.0)
        stream = engine.generate(PROMPTS[0], sampled, "five")
        await anext(stream)
        assert engine.get_num_unfinished_requests() == 1 and 1 <= engine.get_num_unfinished_sequences() <= 5
        await stream.aclose()
        assert engine.get_num_unfinished_sequences() == 0

    run(scenario)


def test_an_undecodable_message_fails_its_requests(monkeypatch):
    """Whatever its source: no caller waits forever."""

    async def scenario(engine):
        wrong = GREEDY.replace_unchecked(top_p=2.0, temperature=1.0, n=3)
        (output,) = [o async for o in engine.generate("x", wrong.replace_unchecked(output_kind=2), "unreadable")]
        assert output.error_kind == ErrorKind.INVALID and "top_p is 2.0" in output.error
        assert [choice.finish_reason for choice in output.outputs] == ["error"] * 3
        with pytest.raises(RuntimeError, match="not a message"):
            await engine._call(5)
        with pytest.raises(RuntimeError, match="unknown call 'nothing'"):
            await engine._call("nothing")
        assert not engine._calls
        await text_of(engine, "x", "after")

    run(scenario)


def test_a_stopped_engine_is_detected_and_may_recover(expected):
    async def scenario(engine):
        pid = engine._connection.host.process.pid
        stream = await reading(engine, PROMPTS[0], "held up", GREEDY.replace(max_tokens=200))
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineStalledError, match="engine-call-timeout"):
                await engine.get_state()
            call = asyncio.create_task(engine.reset_prefix_cache())
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not engine._calls
            with pytest.raises(EngineStalledError, match=r"no heartbeat .* 3 seconds .*heartbeat"):
                while True:
                    await engine.check_health()
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineStalledError):
                await text_of(engine, "x", "refused meanwhile")
            assert engine.get_num_unfinished_requests() == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await stream).startswith(expected[0])
        while True:
            try:
                await engine.check_health()
                break
            except EngineStalledError:
                await asyncio.sleep(0.01)
        assert await text_of(engine, PROMPTS[1], "after") == expected[1]
        assert (await engine.get_state())["front_end"]["calls"] == 0  # timed-out calls are removed

    run(scenario, engine_heartbeat_timeout=3, engine_call_timeout=2)


def test_several_front_ends_share_an_engine(expected):
    """Each has its own requests, also under equal ids; one that disconnects aborts its own."""

    async def scenario():
        config = EngineConfig.from_kwargs(**ARGUMENTS)
        host = EngineConnection(resolve_config(config)[0], client=None)
        try:
            folder = host.host.folder
            first, second = (AsyncLLM(config, EngineChannel(folder, client)) for client in (0, 1))
            host.wait_ready()
            host.host.all_connected()
            assert not folder.exists()  # nothing that a kill could leak
            texts = await asyncio.gather(
                *(text_of(front, p, str(i)) for front in (first, second) for i, p in enumerate(PROMPTS))
            )
            assert texts == expected * 2
            left = await reading(first, PROMPTS[0], "left", GREEDY.replace(max_tokens=200))
            running = await reading(second, PROMPTS[1], "running", GREEDY.replace(max_tokens=20))
            while second.stats.num_running < 2:
                await asyncio.sleep(0.01)
            first.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await left
            assert (await running).startswith(expected[1])
            while (await second.get_state())["core"]["requests"]:
                await asyncio.sleep(0.01)
            await whole(second)
            second.shutdown()
        finally:
            host.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_engine_process_for_synchronous_use(expected):
    with LLM(multiprocess=True, **ARGUMENTS) as llm:
        assert [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
        sampled = llm.generate(PROMPTS[0], GREEDY.replace(temperature=1.0, n=2, logprobs=1), use_tqdm=False)[0]
        assert all(len(part.logprobs) == 12 for part in sampled.outputs)
        with pytest.raises(ValueError, match="empty"):
            llm.generate([[]], use_tqdm=False)
        assert llm.llm_engine.reset_prefix_cache()
        client = llm.llm_engine.client
        with pytest.raises(RuntimeError, match="unknown call 'nothing'"):
            client._call("nothing")
        unsent = GREEDY.replace_unchecked(seed=2**70)
        for _ in range(2):
            with pytest.raises(OverflowError):
                llm.llm_engine.add_request("unsent", PROMPTS[0], unsent)
        assert not llm.llm_engine.has_unfinished_requests()
        os.kill(client.connection.host.process.pid, signal.SIGSTOP)
        client._call_timeout = 0.3
        with pytest.raises(EngineStalledError, match=r"reset_prefix_cache within 0\.3 seconds"):
            llm.llm_engine.reset_prefix_cache()
        os.kill(client.connection.host.process.pid, signal.SIGCONT)
        llm.llm_engine.add_request("gone", PROMPTS[0], GREEDY)
        os.kill(llm.llm_engine.client.connection.host.process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.client.connection.host.process.is_alive()
    with pytest.raises(EngineDeadError, match="longest that fits"):
        LLM(multiprocess=True, num_gpu_blocks_override=2, max_model_len=100)


def test_an_engine_that_cannot_start_reports_the_cause():
    with pytest.raises(EngineDeadError, match="longest that fits"):
        start(num_gpu_blocks_override=2, max_model_len=100, kv_cache_memory_bytes=None)
    with pytest.raises(ValueError, match="no/such/model"):
        start(model="no/such/model")


def test_a_program_that_does_not_shut_down_exits(tmp_path):
    program = tmp_path / "forgetful.py"
    program.write_text(
        "from quire import LLM\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM(multiprocess=True, **{ARGUMENTS!r})\n"
        "    print(llm.llm_engine.client.connection.host.process.pid, flush=True)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(f"/proc/{int(done.stdout.split()[-1])}")


def test_the_engine_dies_with_its_front_end(tmp_path):
    program = tmp_path / "front_end.py"
    program.write_text(
        "import os, signal\n"
        "from quire.config import EngineConfig\n"
        "from quire.engine.async_llm import AsyncLLM\n"
        "if __name__ == '__main__':\n"
        f"    engine = AsyncLLM(EngineConfig.from_kwargs(**{ARGUMENTS!r}))\n"
        "    import sys\n"
        "    assert 'torch' not in sys.modules\n"
        "    print(engine._connection.host.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=os.getcwd())
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel's signal is in transit
    assert not os.path.exists(f"/proc/{pid}")
