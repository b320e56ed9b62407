"""`quire bench structured`: requests under a JSON schema against unconstrained ones, alternating."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from quire.bench.common import add_shape_flags, bench_parser, print_report, warm_up
from quire.bench.report import Metric
from quire.bench.workloads import CPU_SHAPES, Shape, random_workload
from quire.config.flags import FlagParser, engine_kwargs

if TYPE_CHECKING:
    from quire import LLM

DEFAULT = CPU_SHAPES["throughput"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["engineer", "editor", "none"]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "age", "role", "score", "tags"],
    "additionalProperties": False,
}
# Long enough that every request reaches max_tokens: an early stop would shrink the batch.
SCHEMA: dict[str, Any] = {"type": "array", "items": PERSON, "minItems": 1000}


def parser() -> FlagParser:
    parser = bench_parser("structured", "Measure what a JSON schema costs: the same load with and without it.", 5)
    add_shape_flags(parser, DEFAULT, many=True)
    # At 0, unconstrained requests take a slower sampler path on a CPU, which would hide the masks' cost.
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of both kinds (default: 1)")
    return parser


def run(args: argparse.Namespace) -> int:
    from quire import LLM

    shape = Shape(requests=args.num_prompts, own=args.input_len, output=args.output_len)
    llm = LLM(**engine_kwargs(args))
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    try:
        warm_up(llm, args.token_id_limit)
        first = _seconds(llm, [list(range(100, 108))], [1], 0.0, SCHEMA)[0]
        for repetition in range(args.repetitions + 1):
            prompts = random_workload("structured", repetition, shape, args.token_id_limit).prompts
            kinds = ["schema", "free"] if repetition % 2 else ["free", "schema"]  # alternate the order
            seconds, lengths = {}, {}
            for kind in kinds:
                llm.reset_prefix_cache()
                form = SCHEMA if kind == "schema" else None
                wanted = [shape.output] * shape.requests
                seconds[kind], lengths[kind] = _seconds(llm, prompts, wanted, args.temperature, form)
            if lengths["schema"] != lengths["free"]:
                raise ValueError("the two kinds got different numbers of tokens; is --output-len too long?")
            if repetition:  # the first pair is the warm-up
                for kind in kinds:
                    rates[kind].append(sum(lengths[kind]) / seconds[kind])
    finally:
        llm.shutdown()

    ratios = [schema / free for schema, free in zip(rates["schema"], rates["free"], strict=True)]
    metrics = [
        Metric("free", "tok/s", rates["free"]),
        Metric("under a schema", "tok/s", rates["schema"]),
        Metric("ratio", "", ratios),
        Metric("first request under a schema", "s", [first], lower_is_better=True),
    ]
    facts = {"requests": shape.requests, "input_len": shape.own, "output_len": shape.output}
    print_report("structured", args, facts | {"temperature": args.temperature}, metrics)
    return 0


def _seconds(
    llm: "LLM", prompts: list[list[int]], lengths: list[int], temperature: float, schema: dict[str, Any] | None
) -> tuple[float, list[int]]:
    """Seconds of one blocking call, and the number of tokens of each request."""
    from quire import SamplingParams
    from quire.sampling_params import StructuredOutputsParams

    form = None if schema is None else StructuredOutputsParams(json=schema)
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=form,
        )
        for i, length in enumerate(lengths)
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if failed := next((output.error for output in outputs if output.error), None):
        raise ValueError(f"a request failed: {failed}")
    return seconds, [len(output.outputs[0].token_ids) for output in outputs]
