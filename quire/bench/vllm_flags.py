"""vLLM's benchmark flags that do nothing here: refused with the feature to come, or accepted because already true."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.config.flags import number

IMAGES = "images, video and audio in benchmarks"
HUB = "datasets of the Hugging Face hub; give a local file with --dataset-name sharegpt, sonnet or custom"
TRACES = "timed traces"
RERANKING = "reranking in benchmarks"
CHATS = "embeddings of chats and images in benchmarks; openai-embeddings sends texts"
OTHER_ENGINES = "measuring other engines offline"
PLOTS = "interactive plots; --plot FILE.png draws percentiles and a timeline"
BEAMS = "beam search in requests of this benchmark"


@dataclass(frozen=True)
class NotYet:
    feature: str
    neutral: str | None = None  # a value that asks for nothing


# Names are in tests/bench/vllm_bench_flags.json; every one of them is a working flag or listed here.
NOT_YET: dict[str, NotYet] = {
    "--enable-multimodal-chat": NotYet(IMAGES),
    "--custom-ensure-client-side-data": NotYet(IMAGES),
    "--random-mm-base-items-per-request": NotYet(IMAGES),
    "--random-mm-num-mm-items-range-ratio": NotYet(IMAGES),
    "--random-mm-limit-mm-per-prompt": NotYet(IMAGES),
    "--random-mm-bucket-config": NotYet(IMAGES),
    "--asr-max-audio-len-sec": NotYet(IMAGES),
    "--asr-min-audio-len-sec": NotYet(IMAGES),
    "--no-stream": NotYet(HUB),
    "--hf-subset": NotYet(HUB),
    "--hf-split": NotYet(HUB),
    "--hf-name": NotYet(HUB),
    "--hf-output-len": NotYet(HUB),
    "--blazedit-min-distance": NotYet(HUB),
    "--blazedit-max-distance": NotYet(HUB),
    "--bfcl-categories": NotYet(HUB),
    "--spec-bench-output-len": NotYet(HUB),
    "--spec-bench-category": NotYet(HUB),
    "--speed-bench-dataset-subset": NotYet(HUB),
    "--speed-bench-output-len": NotYet(HUB),
    "--speed-bench-category": NotYet(HUB),
    "--timed-trace-chunk-hash-size": NotYet(TRACES),
    "--timed-trace-sec-multiplier": NotYet(TRACES),
    "--timed-trace-label-timestamp": NotYet(TRACES),
    "--timed-trace-label-input-length": NotYet(TRACES),
    "--timed-trace-label-output-length": NotYet(TRACES),
    "--timed-trace-label-hash-ids": NotYet(TRACES),
    "--self-timed": NotYet(TRACES),
    "--no-self-timed": NotYet(TRACES),
    "--random-batch-size": NotYet("batches of prompts offline", "1"),
    "--no-reranker": NotYet(RERANKING),
    "--hf-max-batch-size": NotYet(OTHER_ENGINES),
    "--hf-enable-torch-compile": NotYet(OTHER_ENGINES),
    "--plot-timeline": NotYet(PLOTS),
    "--timeline-itl-thresholds": NotYet(PLOTS, "25,50"),
    "--plot-dataset-stats": NotYet(PLOTS),
    "--use-beam-search": NotYet(BEAMS),
    "--probe-request-rate": NotYet("probe requests beside the load", "0"),
}

# Switches that ask for what is the case anyway.
ACCEPTED = {
    "--disable-tqdm": "no progress bar is drawn",
    "--prequeue-requests": "all requests are queued before the first step",
}
# Engine arguments of vLLM that are a server's options here; a benchmark without a server has no use for them.
OF_SERVERS = (
    *("--served-model-name", "--reasoning-parser", "--reasoning-parser-plugin", "--otlp-traces-endpoint"),
    *("--renderer-num-workers", "--shutdown-timeout"),
)
LOG_SWITCHES = ("--enable-log-requests", "--no-enable-log-requests")

DATASETS_NOT_YET = {
    "hf": HUB,
    "burstgpt": "traces of BurstGPT",
    "random-mm": IMAGES,
    "random-rerank": RERANKING,
    "custom_audio": IMAGES,
    "custom_image": IMAGES,
    "spec_bench": HUB,
    "speed_bench": HUB,
    "timed_trace": TRACES,
}
BACKENDS_NOT_YET = {
    "openai-audio": IMAGES,
    "openai-embeddings-chat": CHATS,
    "openai-embeddings-clip": CHATS,
    "openai-embeddings-vlm2vec": CHATS,
    "infinity-embeddings": CHATS,
    "infinity-embeddings-clip": CHATS,
    "vllm-rerank": RERANKING,
    "hf": OTHER_ENGINES,
    "mii": OTHER_ENGINES,
}


class Refuse(argparse.Action):
    """Ends with the feature that the flag belongs to, unless its value asks for nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name = option or self.option_strings[0]
        row = NOT_YET[name]
        if row.neutral is None or not _equal(values or "", row.neutral):
            hint = "" if row.neutral is None else f" (only {row.neutral} is)"
            parser.error(f"{name} is not available yet{hint}: {row.feature}")


class Accept(argparse.Action):
    """Takes a flag that asks for what is the case."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        pass


def add_vllm_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add those of `names` that the parser does not have; hidden from its help."""
    common: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in names:
        if name in parser._option_string_actions:
            continue
        if name in ACCEPTED or name in LOG_SWITCHES:
            parser.add_argument(name, action=Accept, nargs=0, **common)
        elif name in OF_SERVERS:
            parser.add_argument(name, action=Accept, nargs=1, **common)
        else:
            parser.add_argument(name, action=Refuse, nargs="*" if NOT_YET[name].neutral is None else "?", **common)


def add_lora_assignment(group: Any) -> None:
    ways = ("random", "round-robin")
    group.add_argument("--lora-assignment", choices=ways, default="random", help="how requests get their adapters")


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    """vLLM's engine arguments that have another name here, or none without a server."""
    add_vllm_flags(parser, (*OF_SERVERS, *LOG_SWITCHES))
    if "--device-memory-utilization" not in parser._option_string_actions:
        common: dict[str, Any] = {"type": number, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument("--device-memory-utilization", dest="gpu_memory_utilization", **common)


def choice(allowed: Iterable[str], not_yet: dict[str, str]) -> Any:
    """A parser of names: one of `allowed`; those of vLLM that are to come are named as such."""
    names = list(allowed)

    def parse(text: str) -> str:
        if text in names:
            return text
        listed = ", ".join(names)
        if text in not_yet:
            raise argparse.ArgumentTypeError(f"{text!r} is not available yet: {not_yet[text]}; allowed: {listed}")
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; allowed: {listed}")

    return parse


def _equal(value: str, neutral: str) -> bool:
    try:
        return value == neutral or float(value) == float(neutral)
    except ValueError:
        return False
