"""Mixed traffic for the soak: requests of all kinds, some invalid, some whose clients disconnect."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.bench.serve_client import EventReader, Exchange, Record, Target, decode_event

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "the quick brown fox jumps over a lazy dog while seven wizards read old letters from distant islands"
WORDS = TEXT.split()
INVALID_SHARE = 0.05
INVALID: list[tuple[str, Any, int]] = [  # path, body, status
    (COMPLETIONS, {"prompt": 5}, 400),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400),
    (COMPLETIONS, {"prompt": "x", "n": 100_000}, 400),
    (COMPLETIONS, {"prompt": [1] * 100_000}, 400),
    (COMPLETIONS, {"prompt": [10**9]}, 400),
    (COMPLETIONS, {"prompt": "x", "model": "nobody"}, 404),
    (COMPLETIONS, b'{"prompt": ', 400),
    (CHAT, {"messages": "x"}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, 400),
    ("/v1/nothing", {}, 404),
]


@dataclass
class SoakRequest:
    """A request and its expected result."""

    path: str
    body: Any
    status: int = 200
    choices: int = 0
    stream: bool = False
    disconnect: str | None = None  # during the "body" or the "response", or after a random "time"


@dataclass
class Tally:
    """Every request counts once in `sent` and once in `outcomes`; `failures` are the reasons."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # completed, refused, left, failed
    failures: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0

    def record(self, outcome: str, why: str = "") -> None:
        self.outcomes[outcome] += 1
        if outcome == "failed":
            self.failures[why] += 1


class Traffic:
    def __init__(self, target: Target, seed: int, disconnects: float) -> None:
        self.target = target
        self.rng = random.Random(seed)
        self.disconnects = disconnects
        self.tally = Tally()
        self.host, self.port, self.tls = target.address()

    async def run(self, concurrency: int, stop: asyncio.Event) -> None:
        """Run `concurrency` clients that each send one request after another, until `stop` is set."""

        async def client() -> None:
            while not stop.is_set():
                await self.send(self.request())

        await asyncio.gather(*(client() for _ in range(concurrency)))

    def request(self) -> SoakRequest:
        rng = self.rng
        if rng.random() < INVALID_SHARE:
            return SoakRequest(*rng.choice(INVALID))
        request = self._chat() if rng.random() < 0.4 else self._completion()
        self._add_options(request)
        # Some responses complete before their client disconnects: try more often until enough have.
        missing = self.tally.outcomes["left"] < self.disconnects * self.tally.sent
        if missing and rng.random() < 3 * self.disconnects:
            request.disconnect = rng.choice(("body", "response", "response", "time", "time"))
        return request

    def _completion(self) -> SoakRequest:
        rng = self.rng
        kind = rng.choice(("text", "text", "ids", "texts"))
        if kind == "texts":
            prompts = [self._text(30) for _ in range(rng.randint(1, 3))]
            return SoakRequest(COMPLETIONS, {"prompt": prompts}, choices=len(prompts))
        ids = [rng.randrange(100, 49_000) for _ in range(rng.randint(1, 200))]
        body: dict[str, Any] = {"prompt": self._text(120) if kind == "text" else ids}
        if rng.random() < 0.2:
            body |= {"logprobs": rng.randint(0, 5), "echo": rng.random() < 0.3}
        return SoakRequest(COMPLETIONS, body, choices=1)

    def _chat(self) -> SoakRequest:
        messages = [{"role": "user", "content": self._text(60)}]
        if self.rng.random() < 0.5:  # a cached prefix
            messages.insert(0, {"role": "system", "content": " ".join([TEXT] * 3)})
        body: dict[str, Any] = {"messages": messages}
        if self.rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": self.rng.randint(0, 5)}
        return SoakRequest(CHAT, body, choices=1)

    def _add_options(self, request: SoakRequest) -> None:
        rng, body = self.rng, request.body
        body["max_tokens"] = rng.choice((1, 4, 16, 16, 48))
        body["temperature"] = rng.choice((0.0, 0.7, 1.0))
        body["ignore_eos"] = rng.random() < 0.5
        request.stream = body["stream"] = rng.random() < 0.6
        if body["temperature"] and rng.random() < 0.3:  # greedy choices would all be equal
            body["n"] = rng.randint(2, 3)
            request.choices *= body["n"]
        if rng.random() < 0.3:
            body["stop"] = rng.sample([" the", "e", ".", "\n", "zebra"], rng.randint(1, 2))
        if rng.random() < 0.2:
            body |= {"seed": rng.randint(0, 9), "top_p": 0.9, "repetition_penalty": 1.1}
        if request.stream and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}

    def _text(self, max_words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, max_words)))

    async def send(self, request: SoakRequest) -> None:
        tally = self.tally
        tally.sent += 1
        message = self.target.message("POST", request.path, request.body)
        if request.disconnect == "body":
            message = message[: self.rng.randint(1, len(message) - 1)]
        reader = EventReader(Record(0))
        whole: list[bytes] = []
        pieces, wanted = 0, self.rng.randint(1, 10)
        disconnect_now = asyncio.Event()

        def on_body(data: bytes) -> None:
            nonlocal pieces
            pieces += 1
            if exchange.status == 200 and request.stream:
                reader.feed(data)
            else:
                whole.append(data)
            if request.disconnect == "response" and pieces >= wanted:
                disconnect_now.set()

        exchange = Exchange(message, on_body)
        try:
            async with asyncio.timeout(self.target.timeout):
                await asyncio.get_running_loop().create_connection(lambda: exchange, self.host, self.port, ssl=self.tls)
                how = request.disconnect
                if how is not None and await self._disconnect(how, exchange, disconnect_now):
                    tally.record("left")
                    return
                await exchange.done
        except TimeoutError:
            self._record_failure("timeout")
            return
        except (OSError, ValueError) as error:
            self._record_failure(f"{type(error).__name__}: {error}")
            return
        finally:
            exchange.disconnect()
        self._check_response(request, exchange.status, reader, b"".join(whole))

    def _record_failure(self, why: str) -> None:
        """There was no whole response."""
        self.tally.record("failed", why)

    async def _disconnect(self, how: str, exchange: Exchange, disconnect_now: asyncio.Event) -> bool:
        """Wait for the moment to disconnect; False if the response was complete before."""
        seconds = {"body": 0.0, "time": self.rng.expovariate(2)}.get(how, 30.0)
        waiting = asyncio.ensure_future(disconnect_now.wait())
        both: set[asyncio.Future[Any]] = {exchange.done, waiting}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return not exchange.done.done()

    def _check_response(self, request: SoakRequest, status: int, reader: EventReader, whole: bytes) -> None:
        if status != request.status:
            self.tally.record("failed", f"{request.path}: status {status} instead of {request.status}: {whole[:200]!r}")
        elif request.status != 200:
            self.tally.record("refused")
        elif request.stream:
            reader.close()
            if reader.error is not None or not reader.finished:
                self.tally.record("failed", f"{request.path}: a stream ended early: {reader.error}")
                return
            self.tally.output_tokens += reader.record.output_tokens
            self.tally.record("completed")
        else:
            try:
                response = decode_event(whole)
            except msgspec.MsgspecError as error:
                self.tally.record("failed", f"{request.path}: {error}")
                return
            if len(response.choices) != request.choices:
                count = len(response.choices)
                self.tally.record("failed", f"{request.path}: {count} choices instead of {request.choices}")
                return
            self.tally.output_tokens += response.usage.completion_tokens if response.usage else 0
            self.tally.record("completed")
