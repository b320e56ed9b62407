"""`quire bench throughput`: many requests at once, offline; output tokens per second."""

import argparse
import random
from dataclasses import dataclass
from typing import Any

from quire.bench.common import (
    WARM_UP,
    add_generation_flags,
    add_output_json,
    bench_parser,
    check_lengths,
    exact_params,
    print_report,
    write_json,
)
from quire.bench.datasets import RANDOM, Item, add_dataset_flags, check_dataset, items, set_lengths, workload_facts
from quire.bench.offline import Offline, OfflineAsyncLLM, OfflineLLM
from quire.bench.report import Metric
from quire.bench.texts import LocalTexts
from quire.bench.vllm_flags import BACKENDS_NOT_YET, add_lora_assignment, add_offline_flags, add_vllm_flags, choice
from quire.bench.workloads import CPU_SHAPES, Shape, Workload, random_workload
from quire.config.flags import FlagParser, engine_kwargs, integer
from quire.messages.lora import LoRARequest

DEFAULT = CPU_SHAPES["throughput"]
BACKENDS = ("vllm", "vllm-chat")
OTHER_FLAGS = (
    *("--prequeue-requests", "--enable-multimodal-chat", "--hf-max-batch-size", "--hf-enable-torch-compile"),
    *("--hf-subset", "--hf-split", "--hf-name", "--random-batch-size"),
    *("--no-reranker", "--random-mm-base-items-per-request", "--random-mm-num-mm-items-range-ratio"),
    *("--random-mm-limit-mm-per-prompt", "--random-mm-bucket-config", "--asr-min-audio-len-sec"),
    *("--asr-max-audio-len-sec",),
)


@dataclass(frozen=True)
class Measured:
    seconds: float
    requests: int
    output_tokens: int
    all_tokens: int  # of prompts and outputs


def parser() -> FlagParser:
    parser = bench_parser("throughput", "Measure output tokens per second of many requests at once.", repetitions=3)
    add_dataset_flags(parser, DEFAULT.own, DEFAULT.output, DEFAULT.requests)
    same = "the same as --random-prefix-len, --sonnet-prefix-len"
    parser.add_argument("--prefix-len", type=integer, metavar="N", help=same)
    add_generation_flags(parser)
    parser.add_argument(
        "--backend",
        type=choice(BACKENDS, BACKENDS_NOT_YET),
        default="vllm",
        metavar="NAME",
        help="vllm: prompts as they are; vllm-chat: as messages of a chat (default: vllm)",
    )
    parser.add_argument("--async-engine", action="store_true", help="the engine that servers use, in its own process")
    warm_up = "prompts to run first (default: a few short ones)"
    parser.add_argument("--num-warmups", type=integer, metavar="N", help=warm_up)
    parser.add_argument(
        "--lora-path", metavar="FOLDER", help="an adapter, of which each request uses one of --max-loras copies"
    )
    add_lora_assignment(parser)
    add_output_json(parser)
    add_offline_flags(parser)
    add_vllm_flags(parser, OTHER_FLAGS)
    return parser


def run(args: argparse.Namespace) -> int:
    _settle(args)
    options = engine_kwargs(args)
    chat = args.backend == "vllm-chat"
    engine: Offline = OfflineAsyncLLM(options) if args.async_engine else OfflineLLM(options, chat)
    runs: list[Measured] = []
    try:
        texts = None if args.dataset_name in RANDOM else LocalTexts(engine.tokenizer())
        _warm_up(engine, args, texts)
        for repetition in range(args.repetitions):
            engine.reset_prefix_cache()
            runs.append(_measured(engine, args, _items(args, repetition, texts), args.profile))
    finally:
        engine.shutdown()

    metrics = [
        Metric("output", "tok/s", [one.output_tokens / one.seconds for one in runs]),
        Metric("prompt and output", "tok/s", [one.all_tokens / one.seconds for one in runs]),
        Metric("requests", "/s", [one.requests / one.seconds for one in runs]),
        Metric("time", "s", [one.seconds for one in runs], lower_is_better=True),
    ]
    print_report("throughput", args, _facts(args, runs[0].requests), metrics)
    middle = sorted(runs, key=lambda one: one.all_tokens / one.seconds)[len(runs) // 2]
    results = {
        "elapsed_time": middle.seconds,
        "num_requests": middle.requests,
        "total_num_tokens": middle.all_tokens,
        "requests_per_second": middle.requests / middle.seconds,
        "tokens_per_second": middle.all_tokens / middle.seconds,
    }
    write_json(args.output_json, results)
    return 0


def _measured(engine: Offline, args: argparse.Namespace, found: list[Item], profile: bool = False) -> "Measured":
    lengths = [item.output_len for item in found]
    params = exact_params(lengths, 0.0, args.n, not args.disable_detokenize)
    adapters = _adapters(args, len(found))
    seconds, outputs = engine.generate([item.prompt for item in found], params, adapters, profile)
    check_lengths(outputs, lengths, args.n)
    prompts = [
        item.prompt if isinstance(item.prompt, list) else outputs[i].prompt_token_ids for i, item in enumerate(found)
    ]
    output_tokens = args.n * sum(lengths)
    return Measured(seconds, len(found), output_tokens, output_tokens + sum(map(len, prompts)))


def _adapters(args: argparse.Namespace, count: int) -> list[LoRARequest] | None:
    """As vLLM does: the same adapter under as many names as there are slots."""
    if args.lora_path is None:
        return None
    slots = getattr(args, "max_loras", None) or 1
    rng = random.Random(args.seed)
    in_turns = args.lora_assignment == "round-robin"
    numbers = [i % slots + 1 if in_turns else rng.randint(1, slots) for i in range(count)]
    return [LoRARequest(str(number), number, args.lora_path) for number in numbers]


def _settle(args: argparse.Namespace) -> None:
    """Flags that follow from others."""
    if args.lora_path is not None and not getattr(args, "enable_lora", False):
        raise ValueError("--lora-path needs --enable-lora")
    if args.prefix_len is not None:
        args.random_prefix_len = args.sonnet_prefix_len = args.prefix_len
    set_lengths(args)
    args.seed = getattr(args, "seed", 0)
    check_dataset(args)
    if args.backend == "vllm-chat":
        if args.async_engine:
            raise ValueError("--backend vllm-chat runs without --async-engine; leave one of them out")
        if args.dataset_name in RANDOM:
            raise ValueError("--backend vllm-chat needs texts: --dataset-name sharegpt, sonnet or custom")


def _items(args: argparse.Namespace, repetition: int, texts: LocalTexts | None) -> list[Item]:
    shape = Shape(requests=args.num_prompts, own=args.random_input_len, output=args.random_output_len)
    if args.dataset_name == "random" and not (args.random_prefix_len or args.random_range_ratio or args.seed):
        return _as_items(random_workload("throughput", repetition, shape, args.token_id_limit))
    return items(args, repetition, texts, chat=args.backend == "vllm-chat")


def _as_items(workload: Workload) -> list[Item]:
    return [Item(*pair) for pair in zip(workload.prompts, workload.output_lens, strict=True)]


def _warm_up(engine: Offline, args: argparse.Namespace, texts: LocalTexts | None) -> None:
    if args.num_warmups is None and args.backend == "vllm":
        _measured(engine, args, _as_items(random_workload("warm-up", 0, WARM_UP, args.token_id_limit)))
    elif args.num_warmups:
        changed = argparse.Namespace(**vars(args) | {"num_prompts": args.num_warmups, "seed": args.seed + 1})
        _measured(engine, args, _items(changed, -1, texts))


def _facts(args: argparse.Namespace, count: int) -> dict[str, Any]:
    facts = workload_facts(args) | {"requests": count}
    if args.dataset_name == "random":
        del facts["dataset"]
        facts = {name: value for name, value in facts.items() if value or name not in ("range_ratio", "prefix_len")}
    if args.n > 1:
        facts["n"] = args.n
    return facts
