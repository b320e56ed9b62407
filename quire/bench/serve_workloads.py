"""The requests of `quire bench serve`: their bodies, and arrival times with a rate, a burstiness, a ramp-up."""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.datasets import Item
from quire.bench.serve_client import Request
from quire.config.flags import number

# The flags of sampling parameters; those not given are left to the server.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True)
class RampUp:
    """The rate grows from the first request to the last, linearly or exponentially."""

    strategy: str
    start: float
    end: float

    def rates(self, count: int) -> np.ndarray:
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def ramp_up(args: argparse.Namespace) -> RampUp | None:
    given = [args.ramp_up_start_rps, args.ramp_up_end_rps]
    if args.ramp_up_strategy is None:
        if given != [None, None]:
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
        return None
    if None in given:
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if args.request_rate != float("inf"):
        raise ValueError("--ramp-up-strategy sets the rate; leave --request-rate out")
    if given[0] > given[1]:
        raise ValueError(f"--ramp-up-start-rps {given[0]:g} is above --ramp-up-end-rps {given[1]:g}")
    return RampUp(args.ramp_up_strategy, *given)


def arrivals(count: int, rate: float, burstiness: float, seed: int, ramp: RampUp | None = None) -> list[float]:
    """Seconds after the start. Gaps are gamma distributed; without a ramp-up their sum is scaled to match the rate, so
    that all seeds have the same load."""
    if ramp is None and rate == float("inf"):
        return [0.0] * count
    rates = np.full(count, rate) if ramp is None else ramp.rates(count)
    if burstiness == float("inf"):
        gaps = 1.0 / rates
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rates * burstiness))
    times = np.cumsum(gaps)
    return (times if ramp is not None else times * (count / rate / times[-1])).tolist()


def requests(
    found: list[Item], times: list[float], model: str, chat: bool, args: argparse.Namespace, id_prefix: str
) -> list[Request]:
    common: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    common |= {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if args.ignore_eos:
        common["ignore_eos"] = True
    if args.logprobs is not None:
        common |= {"logprobs": True, "top_logprobs": args.logprobs} if chat else {"logprobs": args.logprobs}
    if chat and args.chat_template_kwargs:
        common["chat_template_kwargs"] = args.chat_template_kwargs
    made = []
    for index, (item, due) in enumerate(zip(found, times, strict=True)):
        own: dict[str, Any] = {"max_tokens": item.output_len}
        if chat:
            own = {"max_completion_tokens": item.output_len, "messages": [{"role": "user", "content": item.prompt}]}
        else:
            own["prompt"] = item.prompt
        made.append(Request(index, common | own | (args.extra_body or {}), due, f"{id_prefix}{index}"))
    return made


def rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be above 0")
    return value
