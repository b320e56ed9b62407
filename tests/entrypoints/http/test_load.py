"""512 streams at once on the real model: every one gets its own text, whole and in order."""

import time
import uuid
from typing import Any

import pytest
import uvloop

from quire import LLM, SamplingParams
from quire.bench.serve_child import serving
from quire.bench.serve_client import Client, Record, Request, Target
from quire.bench.workloads import Shape, random_workload

NUM_STREAMS = 512
OUTPUT_LEN = 8
# One step holds every stream, and float32 keeps a step's other rows from changing a token.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_seqs": NUM_STREAMS,
    "num_gpu_blocks_override": NUM_STREAMS * 2,
}
PROMPTS = random_workload("load", 0, Shape(NUM_STREAMS, own=3, output=OUTPUT_LEN)).prompts


@pytest.fixture(scope="module")
def expected() -> list[str]:
    llm = LLM(**OPTIONS)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    finally:
        llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("api_servers", [1, 2])
def test_512_streams_at_once(expected: list[str], api_servers: int) -> None:
    common = {"max_tokens": OUTPUT_LEN, "temperature": 0, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    requests = [
        Request(i, {"prompt": prompt, "request_id": uuid.uuid4().hex, **common, **usage})
        for i, prompt in enumerate(PROMPTS)
    ]
    with serving(OPTIONS, ["--api-server-count", str(api_servers)]) as server:
        records = uvloop.run(all_streams(server.url, requests))
    assert [record.error for record in records] == [None] * NUM_STREAMS
    assert {record.output_tokens for record in records} == {OUTPUT_LEN}
    assert len(set(expected)) > NUM_STREAMS / 2  # texts that are mixed up would be noticed
    assert ["".join(record.texts[0]) for record in records] == expected
    # They ran concurrently: the last started before the first finished.
    assert max(record.sent for record in records) < min(record.ended for record in records)


async def all_streams(url: str, requests: list[Request]) -> list[Record]:
    run = await Client(Target(url, timeout=240), "/v1/completions", keep_text=True).run(requests, time.perf_counter)
    return sorted(run.records, key=lambda record: record.index)
