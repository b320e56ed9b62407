"""Bodies that once blocked the event loop, and the latency of /health while they are being refused.

python -m tests.entrypoints.http.attacks [--seconds 10] [--json FILE]
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.entrypoints.server_process import ServerProcess, server_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}


def _body(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _repeated(before: bytes, item: bytes, count: int, after: bytes) -> bytes:
    return before + b",".join([item] * count) + after


def _unknown(count: int) -> bytes:
    return b'{"prompt":"x",' + b",".join(b'"unknown_%d":1' % i for i in range(count)) + b"}"


# Built when used: some are tens of megabytes.
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a prompt of 22 MB": (COMPLETIONS, lambda: _body(prompt="word " * 4_400_000)),
    "22 prompts of 1 MB": (COMPLETIONS, lambda: _body(prompt=["word " * 200_000] * 22)),
    "a prompt at the limit": (COMPLETIONS, lambda: _body(prompt="w " * 20_000)),
    "a role of 14 MB": (CHAT, lambda: _body(messages=[{"role": "word " * 2_800_000, "content": "x"}])),
    "22 MB of empty messages": (CHAT, lambda: _repeated(b'{"messages":[', b"{}", 7_300_000, b"]}")),
    "60,000 empty messages": (CHAT, lambda: _repeated(b'{"messages":[', b"{}", 60_000, b"]}")),
    "429 KB of unknown fields": (COMPLETIONS, lambda: _unknown(24_000)),
    "11 MB of unknown fields": (COMPLETIONS, lambda: _unknown(550_000)),
    "500 unknown fields": (COMPLETIONS, lambda: _unknown(500)),
    "8 million allowed_token_ids": (
        COMPLETIONS,
        lambda: _repeated(b'{"prompt":"x","allowed_token_ids":[', b"12", 8_000_000, b"]}"),
    ),
    "a million allowed_token_ids": (
        COMPLETIONS,
        lambda: _repeated(b'{"prompt":"x","allowed_token_ids":[', b"12", 1_000_000, b"]}"),
    ),
    "a million token ids": (COMPLETIONS, lambda: _repeated(b'{"prompt":[', b"12", 1_000_000, b"]}")),
    "a million stop strings": (COMPLETIONS, lambda: _repeated(b'{"prompt":"x","stop":[', b'"a"', 1_000_000, b"]}")),
    "half a million biases": (COMPLETIONS, lambda: _body(prompt="x", logit_bias={str(i): 1 for i in range(500_000)})),
    "a schema of a million values": (
        COMPLETIONS,
        lambda: _repeated(b'{"prompt":"x","structured_outputs":{"json":{"enum":[', b"12", 1_000_000, b"]}}}"),
    ),
    "20 MB without effect": (COMPLETIONS, lambda: _body(prompt="x", max_tokens=1, metadata={"a": ["b" * 9] * 500_000})),
    "1,024 prompts x n 128": (COMPLETIONS, lambda: _body(prompt=["x"] * 1024, n=128, temperature=1)),
    "8 prompts x n 128": (COMPLETIONS, lambda: _body(prompt=["x"] * 8, n=128, temperature=1, max_tokens=2)),
    "tools of 60,000 objects": (
        CHAT,
        lambda: _body(messages=[USER], tools=[{"type": "function", "function": {"a": [{}] * 60}}] * 900),
    ),
}


class HealthWatch:
    """Polls /health on its own connection and records the latencies."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(server.url,), daemon=True)
        self._thread.start()

    def _watch(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not self._stop.is_set():
                began = time.perf_counter()
                try:
                    status = client.get("/health").status_code
                    if status != 200:
                        self.failures.append(str(status))
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                self.seconds.append(time.perf_counter() - began)
                self._stop.wait(0.005)

    def end(self) -> list[float]:
        self._stop.set()
        self._thread.join(120)
        assert not self.failures, self.failures[:3]
        return sorted(self.seconds)


@contextmanager
def watched(server: ServerProcess) -> Iterator[HealthWatch]:
    watch = HealthWatch(server)
    try:
        yield watch
    finally:
        watch.end()


def send(server: ServerProcess, name: str, leave_after: float | None = None) -> int | None:
    """The status, or None if the client disconnected first."""
    path, body = ATTACKS[name]
    headers = {"Content-Type": "application/json"}
    with suppress(httpx.ReadTimeout):
        timeout = httpx.Timeout(120, read=leave_after or 120)
        return httpx.post(server.url + path, content=body(), headers=headers, timeout=timeout).status_code
    return None


def measure(server: ServerProcess, name: str, seconds: float) -> dict[str, Any]:
    body = ATTACKS[name][1]()
    headers = {"Content-Type": "application/json"}
    statuses: dict[int, int] = {}
    with watched(server) as watch:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            response = httpx.post(server.url + ATTACKS[name][0], content=body, headers=headers, timeout=120)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
    found = watch.end()
    milliseconds = {f"p{p}": round(1e3 * found[min(len(found) - 1, len(found) * p // 100)], 1) for p in (50, 99)}
    return {"attack": name, "statuses": statuses, "calls": len(found), **milliseconds, "max": round(1e3 * found[-1], 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder), "--max-model-len", "8192") as server:
        for name in ATTACKS:
            rows.append(measure(server, name, args.seconds))
            row = rows[-1]
            print(f"{name:32} {row['statuses']!s:24} p50 {row['p50']:6} p99 {row['p99']:6} max {row['max']:6} ms")
        assert server.process.poll() is None
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
