"""The requests of `quire bench serve`: their bodies, and arrival times with a rate, a burstiness, a ramp-up."""

import argparse
import random
from dataclasses import dataclass

import numpy as np

from quire.bench.datasets import Item
from quire.bench.serve_apis import Api
from quire.bench.serve_client import Request
from quire.config.flags import number


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
    batches: list[list[Item]], times: list[float], model: str, api: Api, args: argparse.Namespace, id_prefix: str
) -> list[Request]:
    models = _adapters(args, len(batches)) or [model] * len(batches)
    common = api.common(args)
    return [
        Request(i, {"model": models[i]} | common | api.own(one) | (args.extra_body or {}), times[i], f"{id_prefix}{i}")
        for i, one in enumerate(batches)
    ]


def _adapters(args: argparse.Namespace, count: int) -> list[str]:
    """The adapter of each request, in turns or at random; none without --lora-modules."""
    names: list[str] = args.lora_modules or []
    if args.lora_assignment == "round-robin" or not names:
        return [names[i % len(names)] for i in range(count)] if names else []
    rng = random.Random(args.seed)
    return [rng.choice(names) for _ in range(count)]


def rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be above 0")
    return value
