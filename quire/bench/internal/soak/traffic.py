"""Mixed traffic for the soak: requests of all kinds, some of them wrong, some of whose clients leave."""

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
BAD_SHARE = 0.05
WRONG: list[tuple[str, Any, int]] = [  # path, body, status
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
class Shot:
    """A request and what must come of it."""

    path: str
    body: Any
    status: int = 200
    choices: int = 0
    stream: bool = False
    leave: str | None = None  # when its client goes: in the middle of its "body", of the "answer", or at a "time"


@dataclass
class Tally:
    """Every request is counted once under `sent` and once under `outcomes`; `failures` says what was wrong."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # completed, refused, left, failed
    failures: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0

    def note(self, outcome: str, why: str = "") -> None:
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
        """Each of so many clients sends one request after another, until the event is set."""

        async def client() -> None:
            while not stop.is_set():
                await self.send(self.shot())

        await asyncio.gather(*(client() for _ in range(concurrency)))

    def shot(self) -> Shot:
        rng = self.rng
        if rng.random() < BAD_SHARE:
            return Shot(*rng.choice(WRONG))
        shot = self._chat() if rng.random() < 0.4 else self._completion()
        self._add_options(shot)
        # Some answers are complete before their client leaves: more try to, until enough have.
        missing = self.tally.outcomes["left"] < self.disconnects * self.tally.sent
        if missing and rng.random() < 3 * self.disconnects:
            shot.leave = rng.choice(("body", "answer", "answer", "time", "time"))
        return shot

    def _completion(self) -> Shot:
        rng = self.rng
        kind = rng.choice(("text", "text", "ids", "texts"))
        if kind == "texts":
            prompts = [self._text(30) for _ in range(rng.randint(1, 3))]
            return Shot(COMPLETIONS, {"prompt": prompts}, choices=len(prompts))
        ids = [rng.randrange(100, 49_000) for _ in range(rng.randint(1, 200))]
        body: dict[str, Any] = {"prompt": self._text(120) if kind == "text" else ids}
        if rng.random() < 0.2:
            body |= {"logprobs": rng.randint(0, 5), "echo": rng.random() < 0.3}
        return Shot(COMPLETIONS, body, choices=1)

    def _chat(self) -> Shot:
        messages = [{"role": "user", "content": self._text(60)}]
        if self.rng.random() < 0.5:  # a prefix that the cache knows
            messages.insert(0, {"role": "system", "content": " ".join([TEXT] * 3)})
        body: dict[str, Any] = {"messages": messages}
        if self.rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": self.rng.randint(0, 5)}
        return Shot(CHAT, body, choices=1)

    def _add_options(self, shot: Shot) -> None:
        rng, body = self.rng, shot.body
        body["max_tokens"] = rng.choice((1, 4, 16, 16, 48))
        body["temperature"] = rng.choice((0.0, 0.7, 1.0))
        body["ignore_eos"] = rng.random() < 0.5
        shot.stream = body["stream"] = rng.random() < 0.6
        if body["temperature"] and rng.random() < 0.3:  # greedy choices would all be equal
            body["n"] = rng.randint(2, 3)
            shot.choices *= body["n"]
        if rng.random() < 0.3:
            body["stop"] = rng.sample([" the", "e", ".", "\n", "zebra"], rng.randint(1, 2))
        if rng.random() < 0.2:
            body |= {"seed": rng.randint(0, 9), "top_p": 0.9, "repetition_penalty": 1.1}
        if shot.stream and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}

    def _text(self, most: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, most)))

    async def send(self, shot: Shot) -> None:
        tally = self.tally
        tally.sent += 1
        message = self.target.message("POST", shot.path, shot.body)
        if shot.leave == "body":
            message = message[: self.rng.randint(1, len(message) - 1)]
        reader = EventReader(Record(0))
        whole: list[bytes] = []
        pieces, wanted = 0, self.rng.randint(1, 10)
        gone = asyncio.Event()

        def heard(data: bytes) -> None:
            nonlocal pieces
            pieces += 1
            if exchange.status == 200 and shot.stream:
                reader.feed(data)
            else:
                whole.append(data)
            if shot.leave == "answer" and pieces >= wanted:
                gone.set()

        exchange = Exchange(message, heard)
        try:
            async with asyncio.timeout(self.target.timeout):
                await asyncio.get_running_loop().create_connection(lambda: exchange, self.host, self.port, ssl=self.tls)
                if shot.leave is not None and await self._leave(shot.leave, exchange, gone):
                    tally.note("left")
                    return
                await exchange.done
        except TimeoutError:
            self._broken("timeout")
            return
        except (OSError, ValueError) as error:
            self._broken(f"{type(error).__name__}: {error}")
            return
        finally:
            exchange.leave()
        self._judge(shot, exchange.status, reader, b"".join(whole))

    def _broken(self, why: str) -> None:
        """There was no whole answer."""
        self.tally.note("failed", why)

    async def _leave(self, how: str, exchange: Exchange, gone: asyncio.Event) -> bool:
        """Wait for the moment and go; False if the answer was complete before."""
        seconds = {"body": 0.0, "time": self.rng.expovariate(2)}.get(how, 30.0)
        waiting = asyncio.ensure_future(gone.wait())
        both: set[asyncio.Future[Any]] = {exchange.done, waiting}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return not exchange.done.done()

    def _judge(self, shot: Shot, status: int, reader: EventReader, whole: bytes) -> None:
        if status != shot.status:
            self.tally.note("failed", f"{shot.path}: status {status} instead of {shot.status}: {whole[:200]!r}")
        elif shot.status != 200:
            self.tally.note("refused")
        elif shot.stream:
            reader.close()
            if reader.error is not None or not reader.finished:
                self.tally.note("failed", f"{shot.path}: a stream ended early: {reader.error}")
                return
            self.tally.output_tokens += reader.record.output_tokens
            self.tally.note("completed")
        else:
            try:
                answer = decode_event(whole)
            except msgspec.MsgspecError as error:
                self.tally.note("failed", f"{shot.path}: {error}")
                return
            if len(answer.choices) != shot.choices:
                self.tally.note("failed", f"{shot.path}: {len(answer.choices)} choices instead of {shot.choices}")
                return
            self.tally.output_tokens += answer.usage.completion_tokens if answer.usage else 0
            self.tally.note("completed")
