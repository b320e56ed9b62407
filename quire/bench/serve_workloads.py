"""The requests of `quire bench serve`: prompts of three kinds, and arrival times with a rate and a burstiness."""

import argparse
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.common import positive
from quire.bench.serve_client import Request
from quire.bench.workloads import CPU_TOKEN_ID_LIMIT, FIRST_TOKEN_ID
from quire.config.flags import FlagParser, integer, number

DATASETS = ("random", "prefix_repetition", "custom")


@dataclass(frozen=True)
class Item:
    """A prompt, as text or token ids, and how many tokens to generate."""

    prompt: str | list[int]
    output_len: int


def add_workload_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Workload")

    def add(name: str, default: Any, help: str, **kwargs: Any) -> None:
        kind = {"type": positive, "metavar": "N", "default": default} | kwargs
        shown = "" if kind["default"] is None else f" (default: {default})"
        group.add_argument(name, help=help + shown, **kind)

    add("--dataset-name", "random", "kind of prompts", choices=DATASETS, type=str, metavar=None)
    add("--dataset-path", None, "custom: JSONL with prompt (text or token ids) and output_tokens", type=str)
    add("--num-prompts", 1000, "requests to send")
    add("--random-input-len", 1024, "random: prompt tokens")
    add("--random-output-len", 128, "random: tokens to generate")
    add("--random-range-ratio", 0.0, "random: lengths vary by this fraction", type=_ratio, metavar="X")
    add("--random-prefix-len", 0, "random: length of a prefix shared by all prompts", type=_natural)
    add("--prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of a prefix")
    add("--prefix-repetition-suffix-len", 256, "prefix_repetition: own tokens after it")
    add("--prefix-repetition-num-prefixes", 10, "prefix_repetition: different prefixes")
    add("--prefix-repetition-output-len", 128, "prefix_repetition: tokens to generate")
    add("--custom-output-len", 256, "custom: tokens to generate, if a line has no output_tokens")
    add("--token-id-limit", CPU_TOKEN_ID_LIMIT, "draw token ids below this; lower it for a smaller vocabulary")
    add("--seed", 0, "seed of prompts and arrivals", type=integer)
    group = parser.add_argument_group("Arrivals")
    add("--request-rate", float("inf"), "requests per second; inf: all at once", type=_rate, metavar="X")
    add("--burstiness", 1.0, "1: Poisson; below: bursts; above: evenly spaced (gamma)", type=_rate, metavar="X")
    add("--max-concurrency", None, "maximum requests in flight; others wait in the client")


def items(args: argparse.Namespace, repetition: int) -> list[Item]:
    """Every repetition has new prompts, except with a file."""
    rng = random.Random(zlib.crc32(f"serve/{args.dataset_name}/{args.seed}/{repetition}".encode()))
    if args.dataset_name == "custom":
        return _from_file(args)
    if args.token_id_limit <= FIRST_TOKEN_ID:
        raise ValueError(f"token ids are drawn from {FIRST_TOKEN_ID} up; raise --token-id-limit {args.token_id_limit}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, args.token_id_limit) for _ in range(count)]

    if args.dataset_name == "prefix_repetition":
        prefixes = [ids(args.prefix_repetition_prefix_len) for _ in range(args.prefix_repetition_num_prefixes)]
        drawn = [
            Item(
                prefixes[i % len(prefixes)] + ids(args.prefix_repetition_suffix_len), args.prefix_repetition_output_len
            )
            for i in range(args.num_prompts)
        ]
        rng.shuffle(drawn)
        return drawn

    def length(middle: int) -> int:
        low, high = (round(middle * (1 + sign * args.random_range_ratio)) for sign in (-1, 1))
        return rng.randint(max(1, low), max(1, high))

    common = ids(args.random_prefix_len)
    return [
        Item(common + ids(length(args.random_input_len)), length(args.random_output_len))
        for _ in range(args.num_prompts)
    ]


def _from_file(args: argparse.Namespace) -> list[Item]:
    if args.dataset_path is None:
        raise ValueError("--dataset-name custom needs a file (--dataset-path)")
    found = []
    for count, line in enumerate(Path(args.dataset_path).read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{args.dataset_path}, line {count}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        ids = isinstance(prompt, list) and all(type(one) is int for one in prompt)
        if not prompt or not (isinstance(prompt, str) or ids):
            raise ValueError(f'{where} has no prompt; write {{"prompt": text or token ids, "output_tokens": 64}}')
        length = entry.get("output_tokens", args.custom_output_len)
        if type(length) is not int or length < 1:
            raise ValueError(f"{where}: output_tokens is {length!r}; it must be a whole number, at least 1")
        found.append(Item(prompt, length))
        if len(found) == args.num_prompts:
            break
    if not found:
        raise ValueError(f"{args.dataset_path} holds no prompts (--dataset-path)")
    return found


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start. Gaps are gamma distributed; their sum is scaled to match the rate, so that all
    seeds have the same load."""
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()


def requests(found: list[Item], times: list[float], model: str, chat: bool, args: argparse.Namespace) -> list[Request]:
    common: dict[str, Any] = {
        "model": model,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        common["ignore_eos"] = True
    made = []
    for index, (item, due) in enumerate(zip(found, times, strict=True)):
        own: dict[str, Any] = {"max_tokens": item.output_len}
        if chat:
            own = {"max_completion_tokens": item.output_len, "messages": [{"role": "user", "content": item.prompt}]}
        else:
            own["prompt"] = item.prompt
        made.append(Request(index, common | own, due))
    return made


def _rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; it must be above 0")
    return value


def _ratio(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return value


def _natural(text: str) -> int:
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is too small; it must be at least 0")
    return value
