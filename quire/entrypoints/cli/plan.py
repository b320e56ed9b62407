"""`quire plan`: memory, legal sizes, flags and predicted speed of a model on given GPUs, from its config alone."""

import argparse
import json

from quire.bench.workloads import MODEL_SHAPES
from quire.config.flags import FlagParser
from quire.planning.gpus import FORM, read_machine
from quire.planning.memory import Limits
from quire.planning.plan import GOALS, Load, make_plan
from quire.planning.report import as_json, as_text
from quire.planning.shape import read_shape
from quire.planning.source import find_config
from quire.planning.weight_format import gguf_format, read_format

DEFAULTS, LOAD = Limits(1), Load()


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire plan",
        usage='%(prog)s MODEL --gpus "8xH100" [flags]',
        description="What a model needs of GPUs and how fast it would be there. Only its configuration is read, and no "
        "GPU is needed. Exit code 1: it does not fit.",
    )
    shapes = ", ".join(MODEL_SHAPES)
    parser.add_argument("model", metavar="MODEL", help=f"HF folder, .gguf file or hub id, or a shape: {shapes}")
    parser.add_argument("--gpus", required=True, help=FORM.replace("%", "%%"))
    parser.add_argument("--max-model-len", type=int, help="longest request; default: the model's, or what fits")
    parser.add_argument("--batch", default=",".join(map(str, LOAD.batches)), help="requests at once, as 1,16,64,256")
    parser.add_argument("--prompt-len", type=int, default=LOAD.prompt_len, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--output-len", type=int, default=LOAD.output_len, help="tokens of an output (%(default)s)")
    parser.add_argument("--goal", default=LOAD.goal, help=f"what decides: {' or '.join(GOALS)} (%(default)s)")
    parser.add_argument("--quantization", help="while loading: fp8, int8 or int4; default: as the checkpoint is stored")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, bfloat16, float16 or fp8")
    parser.add_argument("--gpu-memory-utilization", type=float, default=DEFAULTS.utilization, help="(%(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULTS.max_num_seqs, help="(%(default)s)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=DEFAULTS.max_num_batched_tokens, help="(%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    from quire.engine.resolve_config import longest_sequence

    machine = read_machine(args.gpus)
    load = Load(_batches(args.batch), args.prompt_len, args.output_len, args.goal)
    hf_config, file_bytes = find_config(args.model, MODEL_SHAPES)
    shape, longest = read_shape(hf_config), longest_sequence(hf_config)
    length = args.max_model_len if args.max_model_len is not None else longest
    if not 1 <= length <= longest:
        raise ValueError(f"max_model_len is {length}; allowed for {args.model}: 1 to {longest}")
    if load.prompt_len + load.output_len > length:
        raise ValueError(
            f"prompt_len {load.prompt_len} and output_len {load.output_len} are more than max_model_len, {length}; "
            "allowed: at most that together"
        )
    weights = read_format(hf_config, args.quantization, shape.dtype_bytes)
    if file_bytes:
        weights = gguf_format(file_bytes, shape.parameters)
    limits = Limits(
        max_model_len=length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        utilization=args.gpu_memory_utilization,
        cache_dtype=args.kv_cache_dtype,
    )
    plan = make_plan(
        args.model,
        shape,
        weights,
        machine,
        limits,
        load,
        may_shorten=args.max_model_len is None,
        quantized_while_loading=args.quantization is not None,
    )
    print(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan))
    return 0 if plan.chosen is not None else 1


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"--batch {text!r}: allowed: numbers of requests from 1 up, as 1,16,64") from error
