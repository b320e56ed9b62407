"""Requests of the soak whose answers are known, to see that no request gets another's answer."""

import asyncio
from collections import Counter

import msgspec

from quire.bench.serve_client import Target, ask

SUBJECTS = ("Paris", "the Moon", "seven", "rain", "a violin", "Monday", "an old bridge", "salt", "chess", "winter")
PROMPTS = tuple(f"Question {i}: what do you know about {subject}?\nAnswer:" for i, subject in enumerate(SUBJECTS))
OUTPUT_TOKENS = 16
SAME = 4  # equal tokens at the beginning make it the other's answer
MAX_DRIFTED = 0.05  # batches of other sizes round otherwise, which may turn a choice between two that are nearly equal


class Choice(msgspec.Struct):
    text: str
    token_ids: list[int]


class Answer(msgspec.Struct):
    choices: list[Choice]


class Probe:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.sent = 0
        self.outcomes: Counter[str] = Counter()  # right, drifted, ended, unreachable, and what is wrong
        self.known: list[list[int]] = []

    async def learn(self) -> None:
        """Each answer by itself, before anything happens."""
        for prompt in PROMPTS:
            status, body = await ask(self.target, "POST", "/v1/completions", self._body(prompt))
            if status != 200:
                raise ValueError(f"a probe is answered with status {status}: {body[:200]!r}")
            self.known.append(msgspec.json.decode(body, type=Answer).choices[0].token_ids)

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.gather(*(self._one(i) for i in range(0, len(PROMPTS), 2)))
            await asyncio.gather(*(self._one(i) for i in range(1, len(PROMPTS), 2)))
            await asyncio.sleep(0.5)

    async def _one(self, i: int) -> None:
        self.sent += 1
        try:
            status, body = await ask(self.target, "POST", "/v1/completions", self._body(PROMPTS[i]))
        except TimeoutError:
            self.outcomes["hanging"] += 1
        except ConnectionRefusedError:
            self.outcomes["unreachable"] += 1
        except OSError:
            self.outcomes["ended"] += 1
        else:
            self.outcomes[self.judged(i, status, body)] += 1

    def judged(self, i: int, status: int, body: bytes) -> str:
        if status in (503, 504):
            return "ended"
        if status != 200:
            return f"status {status}"
        answer = msgspec.json.decode(body, type=Answer).choices[0]
        if not answer.text.startswith(PROMPTS[i]):
            return "mixed up"
        tokens = answer.token_ids
        if tokens == self.known[i]:
            return "right"
        others = [known for j, known in enumerate(self.known) if j != i and known[:SAME] != self.known[i][:SAME]]
        return "mixed up" if any(tokens[:SAME] == known[:SAME] for known in others) else "drifted"

    def problems(self) -> list[str]:
        wrong = [name for name in self.outcomes if name not in ("right", "drifted", "ended", "unreachable")]
        found = [f"{self.outcomes[name]} probes: {name}" for name in wrong]
        if self.outcomes["drifted"] > MAX_DRIFTED * self.sent:
            found.append(f"{self.outcomes['drifted']} of {self.sent} probes differ from their first answer")
        if sum(self.outcomes.values()) != self.sent:
            found.append(f"{self.sent} probes were sent, {sum(self.outcomes.values())} accounted for")
        return found

    @staticmethod
    def _body(prompt: str) -> dict[str, object]:
        return {
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "echo": True,
            "return_token_ids": True,
        }
