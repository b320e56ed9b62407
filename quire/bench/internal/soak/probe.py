"""Soak requests with known responses, to detect a response that belongs to another request."""

import asyncio
from collections import Counter

import msgspec

from quire.bench.serve_client import Target, fetch

SUBJECTS = ("Paris", "the Moon", "seven", "rain", "a violin", "Monday", "an old bridge", "salt", "chess", "winter")
PROMPTS = tuple(f"Question {i}: what do you know about {subject}?\nAnswer:" for i, subject in enumerate(SUBJECTS))
OUTPUT_TOKENS = 16
SAME = 4  # this many equal first tokens identify a response
MAX_DRIFTED = 0.05  # rounding depends on the batch size, which may flip a near tie


class Choice(msgspec.Struct):
    text: str
    token_ids: list[int]


class CompletionResponse(msgspec.Struct):
    choices: list[Choice]


class Probe:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.sent = 0
        self.outcomes: Counter[str] = Counter()  # right, drifted, ended, unreachable, and what is wrong
        self.known: list[list[int]] = []

    async def learn(self) -> None:
        """Record each expected response, one at a time, before the chaos."""
        for prompt in PROMPTS:
            status, body = await fetch(self.target, "POST", "/v1/completions", self._body(prompt))
            if status != 200:
                raise ValueError(f"a probe returned status {status}: {body[:200]!r}")
            self.known.append(msgspec.json.decode(body, type=CompletionResponse).choices[0].token_ids)

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.gather(*(self._one(i) for i in range(0, len(PROMPTS), 2)))
            await asyncio.gather(*(self._one(i) for i in range(1, len(PROMPTS), 2)))
            await asyncio.sleep(0.5)

    async def _one(self, i: int) -> None:
        self.sent += 1
        try:
            status, body = await fetch(self.target, "POST", "/v1/completions", self._body(PROMPTS[i]))
        except TimeoutError:
            self.outcomes["hanging"] += 1
        except ConnectionRefusedError:
            self.outcomes["unreachable"] += 1
        except OSError:
            self.outcomes["ended"] += 1
        else:
            self.outcomes[self.classify(i, status, body)] += 1

    def classify(self, i: int, status: int, body: bytes) -> str:
        if status in (503, 504):
            return "ended"
        if status != 200:
            return f"status {status}"
        response = msgspec.json.decode(body, type=CompletionResponse).choices[0]
        if not response.text.startswith(PROMPTS[i]):
            return "mixed up"
        tokens = response.token_ids
        if tokens == self.known[i]:
            return "right"
        others = [known for j, known in enumerate(self.known) if j != i and known[:SAME] != self.known[i][:SAME]]
        return "mixed up" if any(tokens[:SAME] == known[:SAME] for known in others) else "drifted"

    def problems(self) -> list[str]:
        wrong = [name for name in self.outcomes if name not in ("right", "drifted", "ended", "unreachable")]
        found = [f"{self.outcomes[name]} probes: {name}" for name in wrong]
        if self.outcomes["drifted"] > MAX_DRIFTED * self.sent:
            found.append(f"{self.outcomes['drifted']} of {self.sent} probes differ from their first response")
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
