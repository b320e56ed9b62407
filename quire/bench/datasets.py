"""The prompts of `quire bench serve` and `quire bench throughput`: random token ids, or texts of a local file."""

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.common import positive
from quire.bench.texts import Texts
from quire.bench.vllm_flags import DATASETS_NOT_YET, choice
from quire.bench.workloads import CPU_TOKEN_ID_LIMIT, FIRST_TOKEN_ID
from quire.config.flags import FlagParser, integer, number

RANDOM = ("random", "prefix_repetition")
DATASETS = (*RANDOM, "sharegpt", "sonnet", "custom")
CUSTOM_OUTPUT_LEN = 256
# Conversations of ShareGPT outside these bounds are left out, as in vLLM.
MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048
SONNET_TASK = "Here are lines of poems. Repeat those that you like best:\n"


@dataclass(frozen=True)
class Item:
    """A prompt, as text or token ids, and how many tokens to generate."""

    prompt: str | list[int]
    output_len: int


def add_dataset_flags(parser: FlagParser, input_len: int, output_len: int, num_prompts: int) -> None:
    group = parser.add_argument_group("Workload")

    def add(name: str, default: Any, help: str, **kwargs: Any) -> None:
        kind = {"type": positive, "metavar": "N", "default": default} | kwargs
        shown = "" if kind["default"] is None else f" (default: {default})"
        group.add_argument(name, help=help + shown, **kind)

    kinds = choice(DATASETS, DATASETS_NOT_YET)
    add("--dataset-name", "random", f"kind of prompts: {', '.join(DATASETS)}", type=kinds, metavar="NAME")
    files = "ShareGPT's JSON, a text (sonnet), or JSONL with prompt (text or token ids) and output_tokens (custom)"
    add("--dataset-path", None, f"local file: {files}", type=str, metavar="FILE")
    add("--num-prompts", num_prompts, "requests; -1: as many as the file has", type=integer)
    add("--input-len", None, "prompt tokens: the same as --random-input-len, --sonnet-input-len")
    add("--output-len", None, "tokens to generate, for all kinds of prompts")
    add("--random-input-len", input_len, "random: prompt tokens")
    add("--random-output-len", output_len, "random: tokens to generate")
    ratio = 'random: lengths vary by this fraction; or as JSON {"input": X, "output": X}'
    add("--random-range-ratio", 0.0, ratio, type=_ratio, metavar="X")
    add("--random-prefix-len", 0, "random: length of a prefix shared by all prompts", type=_natural)
    add("--prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of a prefix")
    add("--prefix-repetition-suffix-len", 256, "prefix_repetition: own tokens after it")
    add("--prefix-repetition-num-prefixes", 10, "prefix_repetition: different prefixes")
    add("--prefix-repetition-output-len", 128, "prefix_repetition: tokens to generate")
    add("--sharegpt-output-len", None, "sharegpt: tokens to generate (default: as many as the answer in the file)")
    add("--sonnet-input-len", 550, "sonnet: at most this many prompt tokens")
    add("--sonnet-output-len", 150, "sonnet: tokens to generate")
    add("--sonnet-prefix-len", 200, "sonnet: tokens that all prompts begin with", type=_natural)
    custom = f"custom: tokens to generate; -1: a line's output_tokens (default: that, or else {CUSTOM_OUTPUT_LEN})"
    add("--custom-output-len", None, custom, type=integer)
    skip = "custom: send prompts without the chat template"
    group.add_argument("--skip-chat-template", action="store_true", help=skip)
    group.add_argument("--disable-shuffle", action="store_true", help="take a file's prompts in their order")
    oversample = "send no prompt twice if a file has fewer than --num-prompts"
    group.add_argument("--no-oversample", action="store_true", help=oversample)
    add("--token-id-limit", CPU_TOKEN_ID_LIMIT, "draw token ids below this; lower it for a smaller vocabulary")


def set_lengths(args: argparse.Namespace) -> None:
    """--input-len and --output-len stand for the flags of each dataset."""
    if args.input_len is not None:
        args.random_input_len = args.sonnet_input_len = args.input_len
    if args.output_len is not None:
        for name in ("random", "sonnet", "sharegpt", "custom", "prefix_repetition"):
            setattr(args, f"{name}_output_len", args.output_len)


def check_dataset(args: argparse.Namespace) -> None:
    """Checked before a server is started or a model is loaded."""
    name, path = args.dataset_name, args.dataset_path
    if name in RANDOM:
        if path is not None:
            raise ValueError(f"--dataset-name {name} reads no file; leave --dataset-path out, or name the file's kind")
        if args.num_prompts < 1:
            raise ValueError(f"--num-prompts is {args.num_prompts}; it must be at least 1 without a file")
    elif path is None:
        raise ValueError(f"--dataset-name {name} needs a file (--dataset-path)")
    elif not Path(path).is_file():
        raise ValueError(f"{path!r} is not a file (--dataset-path); nothing is downloaded")
    if args.custom_output_len is not None and args.custom_output_len < 1 and args.custom_output_len != -1:
        raise ValueError(f"--custom-output-len is {args.custom_output_len}; it must be at least 1, or -1")


def items(args: argparse.Namespace, repetition: int, texts: Texts | None = None, chat: bool = False) -> list[Item]:
    """Every repetition has new prompts, except with a file. With `chat` texts stay texts: the server renders them."""
    if args.dataset_name in RANDOM:
        return _random(args, repetition, texts)
    assert texts is not None, "files need a tokenizer"
    rng = random.Random(args.seed)
    drawn = {"sharegpt": _sharegpt, "sonnet": _sonnet, "custom": _custom}[args.dataset_name](args, rng, texts, chat)
    found = []
    for item in drawn:
        found.append(item)
        if len(found) == args.num_prompts:
            break
    if not found:
        raise ValueError(f"{args.dataset_path} holds no prompts for --dataset-name {args.dataset_name}")
    if len(found) < args.num_prompts and not args.no_oversample:
        found += [rng.choice(found) for _ in range(args.num_prompts - len(found))]
    return found


def _random(args: argparse.Namespace, repetition: int, texts: Texts | None) -> list[Item]:
    rng = random.Random(zlib.crc32(f"serve/{args.dataset_name}/{args.seed}/{repetition}".encode()))
    limit = args.token_id_limit
    if texts is not None and texts.vocab_size is not None:
        limit = min(limit, texts.vocab_size)
    if limit <= FIRST_TOKEN_ID:
        raise ValueError(f"token ids are drawn from {FIRST_TOKEN_ID} up; raise --token-id-limit {limit}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, limit) for _ in range(count)]

    if args.dataset_name == "prefix_repetition":
        prefixes = [ids(args.prefix_repetition_prefix_len) for _ in range(args.prefix_repetition_num_prefixes)]
        suffix_len, output_len = args.prefix_repetition_suffix_len, args.prefix_repetition_output_len
        drawn = [Item(prefixes[i % len(prefixes)] + ids(suffix_len), output_len) for i in range(args.num_prompts)]
        rng.shuffle(drawn)
        return drawn

    def length(middle: int, ratio: float) -> int:
        low, high = (round(middle * (1 + sign * ratio)) for sign in (-1, 1))
        return rng.randint(max(1, low), max(1, high))

    given = args.random_range_ratio
    ratios = given if isinstance(given, dict) else {"input": given, "output": given}
    common = ids(args.random_prefix_len)
    return [
        Item(
            common + ids(length(args.random_input_len, ratios["input"])),
            length(args.random_output_len, ratios["output"]),
        )
        for _ in range(args.num_prompts)
    ]


def _sharegpt(args: argparse.Namespace, rng: random.Random, texts: Texts, chat: bool) -> Iterator[Item]:
    """The first message of each conversation, and the length of its answer."""
    try:
        entries = json.loads(Path(args.dataset_path).read_text("utf-8"))
        conversations = [entry["conversations"] for entry in entries if len(entry.get("conversations", ())) >= 2]
        pairs = [(str(turns[0]["value"]), str(turns[1]["value"])) for turns in conversations]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        form = '[{"conversations": [{"value": "..."}, {"value": "..."}]}]'
        raise ValueError(f"{args.dataset_path} is not in ShareGPT's format, {form}: {error!r}") from None
    if not args.disable_shuffle:
        rng.shuffle(pairs)
    for prompt, answer in pairs:
        given = args.sharegpt_output_len
        prompt_len, output_len = len(texts.encode(prompt)), given or len(texts.encode(answer))
        long_enough = prompt_len >= MIN_LEN and (given is not None or output_len >= MIN_LEN)
        if long_enough and prompt_len <= MAX_PROMPT_LEN and prompt_len + output_len <= MAX_TOTAL_LEN:
            yield Item(prompt, output_len)


def _sonnet(args: argparse.Namespace, rng: random.Random, texts: Texts, chat: bool) -> Iterator[Item]:
    """Lines of a text, the first ones shared by all prompts, up to a length."""
    lines = Path(args.dataset_path).read_text("utf-8").splitlines(keepends=True)
    if not lines:
        return
    base = len(texts.encode_chat(SONNET_TASK))
    if args.sonnet_input_len <= base:
        raise ValueError(
            f"--sonnet-input-len is {args.sonnet_input_len}; the task alone has {base} tokens, and a line must follow"
        )
    mean = sum(len(texts.encode(line)) for line in lines) / len(lines)
    num_lines = max(round((args.sonnet_input_len - base) / mean), 1)
    num_shared = max(round((args.sonnet_prefix_len - base) / mean), 0)
    if num_shared > num_lines:
        raise ValueError("--sonnet-prefix-len is above --sonnet-input-len; the prefix is a part of the prompt")
    failures = 0
    for _ in range(max(args.num_prompts, 1)):
        while True:
            drawn = rng.choices(lines, k=num_lines - num_shared)
            prompt = SONNET_TASK + "".join([*lines[:num_shared], *drawn])
            tokens = texts.encode_chat(prompt)
            if len(tokens) <= args.sonnet_input_len:
                break
            failures += 1
            if failures > 100 * max(args.num_prompts, 1):
                raise ValueError(f"no prompt of {args.sonnet_input_len} tokens can be made of {args.dataset_path}")
        yield Item(prompt if chat else tokens, args.sonnet_output_len)


def _custom(args: argparse.Namespace, rng: random.Random, texts: Texts, chat: bool) -> Iterator[Item]:
    entries = list(_custom_lines(args))
    if not args.disable_shuffle:
        rng.shuffle(entries)
    for item in entries:
        if isinstance(item.prompt, str) and not chat and not args.skip_chat_template:
            yield Item(texts.encode_chat(item.prompt), item.output_len)
        else:
            yield item


def _custom_lines(args: argparse.Namespace) -> Iterator[Item]:
    given = args.custom_output_len
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
        of_line = entry.get("output_tokens", CUSTOM_OUTPUT_LEN if given is None else None)
        length = of_line if given in (None, -1) else given
        if type(length) is not int or length < 1:
            raise ValueError(f"{where}: output_tokens is {length!r}; it must be a whole number, at least 1")
        yield Item(prompt, length)


def workload_facts(args: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"dataset": args.dataset_name, "requests": args.num_prompts}
    if args.dataset_name == "random":
        facts |= {"input_len": args.random_input_len, "output_len": args.random_output_len}
        return facts | {"range_ratio": args.random_range_ratio, "prefix_len": args.random_prefix_len}
    if args.dataset_name == "prefix_repetition":
        return facts | {
            "prefixes": args.prefix_repetition_num_prefixes,
            "prefix_len": args.prefix_repetition_prefix_len,
            "suffix_len": args.prefix_repetition_suffix_len,
            "output_len": args.prefix_repetition_output_len,
        }
    return facts | {"file": Path(args.dataset_path).name}


def _ratio(text: str) -> float | dict[str, float]:
    if not text.lstrip().startswith("{"):
        return _fraction(text)
    try:
        given = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None
    if given.keys() != {"input", "output"}:
        raise argparse.ArgumentTypeError(f'{text!r}: write {{"input": X, "output": X}}')
    return {name: _fraction(str(value)) for name, value in given.items()}


def _fraction(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return value


def _natural(text: str) -> int:
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is too small; it must be at least 0")
    return value
