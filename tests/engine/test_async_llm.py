"""The engine in a process of its own."""

import asyncio
import os
import signal
import time

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.async_engine import EngineDeadError
from quire.engine.async_llm import AsyncLLM
from quire.messages.sampling_params import RequestOutputKind

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
    """A scenario with an engine of its own, in a loop of its own."""

    async def main():
        engine = start(**arguments)
        try:
            await asyncio.wait_for(scenario(engine), 120)
        finally:
            engine.shutdown()
        assert not engine._connection.process.is_alive()
        assert not engine._connection._folder.exists()

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
    """A task that reads a stream and has had its first output."""
    begun = asyncio.Event()
    task = asyncio.create_task(text_of(engine, prompt, request_id, params, begun))
    await begun.wait()
    return task


async def whole(engine):
    """No request is left and all blocks came back, seen through the engine's own numbers."""
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
        os.kill(engine._connection.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - killed < 1
        assert all(isinstance(r, EngineDeadError) and "exit code -9" in str(r) for r in results)
        for use in (engine.check_health(), text_of(engine, "x", "late"), engine.reset_prefix_cache()):
            with pytest.raises(EngineDeadError):
                await use

    run(scenario)


def test_an_engine_that_cannot_start_says_why():
    with pytest.raises(EngineDeadError, match="longest that fits"):
        start(num_gpu_blocks_override=2, max_model_len=100, kv_cache_memory_bytes=None)
    with pytest.raises(ValueError, match="no/such/model"):
        start(model="no/such/model")


def test_the_engine_dies_with_its_front_end(tmp_path):
    import subprocess
    import sys

    program = tmp_path / "front_end.py"
    program.write_text(
        "import os, signal\n"
        "from quire.config import EngineConfig\n"
        "from quire.engine.async_llm import AsyncLLM\n"
        "if __name__ == '__main__':\n"
        f"    engine = AsyncLLM(EngineConfig.from_kwargs(**{ARGUMENTS!r}))\n"
        "    import sys\n"
        "    assert 'torch' not in sys.modules\n"
        "    print(engine._connection.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=os.getcwd())
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel's own signal is on its way
    assert not os.path.exists(f"/proc/{pid}")
