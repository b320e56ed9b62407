"""Operators who contradict each other while requests come: every call is answered, and no text is wrong."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.entrypoints.server_process import SECONDS, server_process
from tests.weights.models import two_models

NUM_CALLS, NUM_REQUESTS, LENGTH = 40, 40, 6
PROMPTS = [[random.Random(i).randrange(1, 200) for _ in range(90)] for i in range(6)]
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--num-gpu-blocks-override", "60", "--cpu-threads", "1")
TIERS = ("--kv-offloading-size", "0.01", "--kv-offloading-path")


def calls(checkpoint: str) -> list[tuple[str, Any]]:
    pauses = ["/pause?mode=abort", "/pause?mode=keep", "/pause?mode=wait", "/pause?mode=keep&clear_cache=false"]
    sleeps = ["/sleep?level=0", "/sleep?level=1", "/sleep?level=1&mode=keep", "/sleep?level=2"]
    wakes = ["/wake_up", "/resume", "/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/wake_up", "/resume"]
    updates = ["/start_weight_update", "/finish_weight_update", "/release_kv_cache_memory", "/reset_prefix_cache"]
    return [(path, None) for path in (*pauses, *sleeps, *wakes, *updates)] + [
        ("/update_weights", {"update_info": {"path": checkpoint}}),
        ("/collective_rpc", {"method": "reload_weights"}),
    ]


def test_contradicting_operators_under_load(tmp_path: Path) -> None:
    checkpoint, _ = two_models("llama")
    flags = (*FLAGS, "--enable-sleep-mode", "--enable-admin", *TIERS, str(tmp_path / "kv"))
    params = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
    wrong: list[Any] = []
    with server_process(tmp_path, "--model", checkpoint, *flags) as server:

        def generate(client: httpx.Client, i: int) -> dict[str, Any]:
            body = {"token_ids": PROMPTS[i], "sampling_params": params}
            choice: dict[str, Any] = client.post("/inference/v1/generate", json=body).json()["choices"][0]
            return choice

        def operate(client: httpx.Client, draw: random.Random) -> None:
            for _ in range(NUM_CALLS):
                path, body = draw.choice(calls(checkpoint))
                response = client.post(path, json=body)
                if response.status_code not in (200, 400):
                    wrong.append((path, response.text))

        def ask(client: httpx.Client, draw: random.Random) -> None:
            for _ in range(NUM_REQUESTS):
                i = draw.randrange(len(PROMPTS))
                choice = generate(client, i)
                found, aborted = choice["token_ids"], choice["finish_reason"] == "abort"
                if found != expected[i][: len(found)] or (len(found) < LENGTH and not aborted):
                    wrong.append((i, choice))

        def start(work: Callable[[httpx.Client, random.Random], None], seed: int) -> threading.Thread:
            def run() -> None:
                try:
                    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
                        work(client, random.Random(seed))
                except Exception as error:
                    wrong.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            expected = [generate(client, i)["token_ids"] for i in range(len(PROMPTS))]
            users = [start(ask, seed) for seed in range(4)]
            operators = [start(operate, seed) for seed in range(10, 13)]
            # One may wait for requests to end ("wait") that another has paused ("keep").
            while any(thread.is_alive() for thread in operators + users):
                if not all(thread.is_alive() for thread in operators):
                    client.post("/finish_weight_update")  # one that was begun keeps discarded weights from being read
                    client.post("/wake_up")
                    client.post("/resume")
                operators[0].join(0.05)
            assert not wrong, wrong[:3]
            client.post("/wake_up")
            client.post("/resume")
            assert [generate(client, i)["token_ids"] for i in range(len(PROMPTS))] == expected
