"""The flags of `quire bench serve`; names and meanings follow `vllm bench serve`."""

import argparse
import uuid
from typing import Any

from quire.bench.common import positive
from quire.bench.datasets import add_dataset_flags
from quire.bench.serve_apis import BACKENDS, SAMPLING
from quire.bench.serve_rows import ROWS
from quire.bench.serve_stats import NAMES, goodput_limits, latency_names, percentile_list
from quire.bench.serve_workloads import rate
from quire.bench.vllm_flags import BACKENDS_NOT_YET, add_lora_assignment, add_vllm_flags, choice
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, integer, json_object, number

OTHER_FLAGS = (
    *("--disable-tqdm", "--no-stream", "--enable-multimodal-chat", "--custom-ensure-client-side-data"),
    *("--spec-bench-output-len", "--spec-bench-category", "--blazedit-min-distance", "--blazedit-max-distance"),
    *("--speed-bench-dataset-subset", "--speed-bench-output-len", "--speed-bench-category", "--bfcl-categories"),
    *("--timed-trace-chunk-hash-size", "--timed-trace-sec-multiplier", "--timed-trace-label-timestamp"),
    *("--timed-trace-label-input-length", "--timed-trace-label-output-length", "--timed-trace-label-hash-ids"),
    *("--self-timed", "--no-self-timed", "--asr-max-audio-len-sec", "--asr-min-audio-len-sec"),
    *("--no-reranker", "--random-mm-base-items-per-request", "--random-mm-bucket-config"),
    *("--random-mm-num-mm-items-range-ratio", "--random-mm-limit-mm-per-prompt", "--hf-subset", "--hf-split"),
    *("--hf-name", "--hf-output-len", "--use-beam-search"),
    *("--probe-request-rate", "--plot-timeline", "--timeline-itl-thresholds", "--plot-dataset-stats"),
)


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire bench serve",
        description="Measure a server under load. Without --base-url, --host, --port or --backend a server is started "
        "with the engine flags.",
    )
    add_model_argument(parser)
    _add_server_flags(parser)
    add_dataset_flags(parser, input_len=1024, output_len=128, num_prompts=1000)
    _add_arrival_flags(parser)
    _add_request_flags(parser)
    _add_measurement_flags(parser)
    _add_output_flags(parser)
    add_vllm_flags(parser, OTHER_FLAGS)
    add_engine_flags(parser, leave_out=("seed",))
    return parser


def _add_server_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Server")
    group.add_argument("--base-url", metavar="URL", help="a running server, as http://HOST:PORT; the same as:")
    group.add_argument("--host", metavar="TEXT", help="address of a running server")
    group.add_argument("--port", type=integer, metavar="N", help="its port (default: 8000)")
    group.add_argument(
        "--backend",
        type=choice(BACKENDS, BACKENDS_NOT_YET),
        metavar="NAME",
        help=f"API of a running server: {', '.join(BACKENDS)}; without an address at 127.0.0.1:8000",
    )
    group.add_argument("--endpoint", metavar="PATH", help="(default: the backend's, such as /v1/completions)")
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name in requests (default: --model)")
    group.add_argument(
        "--header", nargs="*", type=pair, metavar="KEY=VALUE", default=[], help="more headers for every request"
    )
    group.add_argument("--insecure", action="store_true", help="accept any certificate of the server")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=number,
        default=0.0,
        metavar="S",
        help="wait this long for the first response before measuring (default: 0, do not)",
    )
    group.add_argument("--server-args", default="", metavar="TEXT", help="more flags for the server that is started")
    group.add_argument("--row", choices=tuple(ROWS), help="preset: a fixed workload; sets all its flags")


def _add_arrival_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Arrivals")

    def add(name: str, help: str, **kwargs: Any) -> None:
        kind: dict[str, Any] = {"type": rate, "metavar": "X"}
        group.add_argument(name, help=help, **kind | kwargs)

    add("--seed", "seed of prompts and arrivals (default: 0)", type=integer, metavar="N", default=0)
    add("--request-rate", "requests per second; inf: all at once (default: inf)", default=float("inf"))
    add("--burstiness", "1: Poisson; below: bursts; above: evenly spaced (gamma; default: 1)", default=1.0)
    add("--max-concurrency", "maximum requests in flight; others wait in the client", type=positive, metavar="N")
    strategies = ("linear", "exponential")
    add("--ramp-up-strategy", "let the rate grow over the run", type=str, choices=strategies, metavar=None)
    add("--ramp-up-start-rps", "requests per second of the first request")
    add("--ramp-up-end-rps", "requests per second of the last request")


def _add_request_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Requests")
    group.add_argument("--ignore-eos", action="store_true", help="generate to exactly the wanted length; on for random")
    for name in SAMPLING:
        kind, metavar = (integer, "N") if name == "top_k" else (number, "X")
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=metavar, help="(default: the server's)")
    group.add_argument(
        "--random-batch-size",
        type=positive,
        default=1,
        metavar="N",
        help="prompts in a request that pools (default: 1)",
    )
    add_lora_assignment(group)
    group.add_argument("--lora-modules", nargs="+", metavar="NAME", help="adapters of the server that requests name")
    group.add_argument("--logprobs", type=integer, metavar="N", help="of the N most likely tokens per position")
    group.add_argument("--extra-body", type=json_object, metavar="JSON", help="more fields of every request")
    group.add_argument(
        "--chat-template-kwargs", type=json_object, metavar="JSON", help="variables of the chat template"
    )
    group.add_argument(
        "--request-id-prefix",
        default=f"bench-{uuid.uuid4().hex[:8]}-",
        metavar="TEXT",
        help="request ids begin with it, then the number (default: bench-RANDOM-)",
    )


def _add_measurement_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Measurement")
    group.add_argument(
        "--repetitions", type=positive, default=1, metavar="N", help="runs to take medians of (default: 1)"
    )
    group.add_argument(
        "--client-processes", type=positive, default=1, metavar="N", help="that share the requests (default: 1)"
    )
    group.add_argument(
        "--percentile-metrics",
        type=latency_names,
        metavar="LIST",
        help=f"latencies to report (default: {','.join(NAMES)}; of requests that pool e2el)",
    )
    group.add_argument(
        "--metric-percentiles", type=percentile_list, default=[50, 90, 99], metavar="LIST", help="(default: 50,90,99)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=goodput_limits,
        metavar="NAME:MS",
        help="count requests within these limits, as ttft:200 tpot:50 (also e2el)",
    )
    group.add_argument("--timeout", type=number, default=3600.0, metavar="S", help="for one request (default: 3600)")
    group.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="run some requests first")
    group.add_argument(
        "--num-warmups", type=integer, metavar="N", help="run the first request N times first, instead of --warm-up"
    )
    group.add_argument("--profile", action="store_true", help="let the server's profiler record the measured requests")
    group.add_argument("--probe", action=argparse.BooleanOptionalAction, default=False, help="measure the machine too")


def _add_output_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--result-file", metavar="FILE", help="write that object to this file")
    group.add_argument("--save-result", action="store_true", help="write a file of results with vLLM's keys")
    group.add_argument("--append-result", action="store_true", help="append them to the file instead")
    group.add_argument("--save-detailed", action="store_true", help="with lengths, times and texts of every request")
    group.add_argument("--result-dir", metavar="FOLDER", help="where the file goes (default: the current folder)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: LABEL-RATEqps-MODEL-DATE.json)")
    group.add_argument("--label", metavar="TEXT", help="first part of the file's name (default: --backend)")
    group.add_argument(
        "--metadata", nargs="*", type=pair, default=[], metavar="KEY=VALUE", help="more keys of the results"
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw percentiles and a timeline (needs matplotlib)")


def pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: write KEY=VALUE")
    return key.strip(), value.strip()
