"""`quire run-batch`: run a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs, integer
from quire.config.server import add_server_flags, server_config
from quire.entrypoints.cli import start
from quire.entrypoints.cli.api_client import add_client_flags, client_from

if TYPE_CHECKING:
    from quire.config.server import ServerConfig
    from quire.entrypoints.cli.batch_output import BatchOutput
    from quire.entrypoints.cli.batch_runner import BatchRunner, Sender

# Server options that apply without a socket and to a single user.
SERVER_OPTIONS = (
    "served_model_name",
    "trust_request_chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "response_role",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "tool_parser_plugin",
    "exclude_tools_when_tool_choice_none",
    "strict_fields",
    "max_request_bytes",
    "request_timeout",
    "max_prompts",
    "max_n",
    "max_stop",
)
METRICS_OPTIONS = ("host", "port")  # where --enable-metrics listens
HTTP_CONCURRENCY = 64  # requests in flight with --url


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire run-batch",
        description="Run each line of a file in OpenAI's batch format, with an engine in this process or, with "
        "--url, a running server. Results are in the order of the requests. A request that fails does so alone; the "
        "exit code is 1 if a line is no request at all.",
        usage="%(prog)s -i INPUT -o OUTPUT [MODEL] [flags]",
    )
    add_model_argument(parser)
    group = parser.add_argument_group("Batch")
    group.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one per line")
    group.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="FILE", help="where results go; replaced at the end"
    )
    group.add_argument(
        "--max-concurrency",
        type=integer,
        metavar="N",
        help=f"requests at once (default: twice what the engine runs at once; with --url {HTTP_CONCURRENCY})",
    )
    group.add_argument(
        "--enable-metrics", action="store_true", help="serve /metrics at --host and --port while the batch runs"
    )
    add_client_flags(parser, default_url=None)
    add_server_flags(parser, only=(*SERVER_OPTIONS, *METRICS_OPTIONS))
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Flags and files are checked before the model is loaded."""
    from quire.entrypoints.cli.batch_input import check_file
    from quire.entrypoints.cli.batch_output import BatchOutput

    config = server_config(args, (*SERVER_OPTIONS, *METRICS_OPTIONS))
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ValueError(f"max_concurrency is {args.max_concurrency}; it must be 1 or more (--max-concurrency)")
    if not args.input_file.is_file():
        raise ValueError(f"{args.input_file} is not a file (--input-file)")
    if args.output_file.resolve() == args.input_file.resolve():
        raise ValueError("the output would replace the input; give another --output-file")
    count = check_file(args.input_file, config.max_request_bytes)
    with BatchOutput(args.output_file, count) as output:
        began = time.perf_counter()
        if count == 0:
            output.finish()
            print(f"quire: {args.input_file} holds no request; {args.output_file} is empty", file=sys.stderr)
            return 0
        try:
            runner = _with_server(args, config, output) if args.url else _with_engine(args, config, output)
        except BaseException:
            if output.num_written:
                where = f"{output.partial} holds {output.num_written} of {count} results"
                print(f"quire: stopped; {where}, in order of completion", file=sys.stderr)
            raise
        output.finish()
    _report(runner, count, time.perf_counter() - began, args.output_file)
    return 1 if runner.has_invalid_lines else 0  # requests that fail have their error in the results


def _with_server(args: argparse.Namespace, config: "ServerConfig", output: "BatchOutput") -> "BatchRunner":
    from quire.entrypoints.cli.batch_runner import OverHttp

    start.refuse_engine_flags(args)
    if args.enable_metrics:
        raise ValueError("--enable-metrics with --url: the server has metrics of its own, at /metrics")
    for name in SERVER_OPTIONS:
        if hasattr(args, name) and name != "max_request_bytes":
            raise ValueError(f"--{name.replace('_', '-')} with --url: such options belong to the server")
    if args.model_name is not None:
        raise ValueError("the requests name their model themselves; leave --model-name out")
    client = client_from(args)
    client.model_names()  # fails early if the server or the key is wrong
    concurrency = args.max_concurrency or HTTP_CONCURRENCY
    sender = OverHttp(client, concurrency)
    try:
        return asyncio.run(_run_batch(args.input_file, config, sender, output, concurrency))
    finally:
        sender.close()


def _with_engine(args: argparse.Namespace, config: "ServerConfig", output: "BatchOutput") -> "BatchRunner":
    from quire.config import EngineConfig
    from quire.config.logs import set_up_logging
    from quire.config.vllm.unpack import logging_options

    for name in ("model_name", "api_key"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a server; give its address with --url")
    engine_args = engine_kwargs(args)
    set_up_logging(*logging_options(engine_args))
    engine_config = EngineConfig.from_kwargs(**engine_args)
    config.access_log = False
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.cli.batch_metrics import serving_metrics
    from quire.entrypoints.cli.batch_runner import InProcess
    from quire.entrypoints.http.app import build_app
    from quire.entrypoints.http.server import bind

    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(bind(config)) if args.enable_metrics else None
        engine = AsyncLLM(engine_config)
        stack.callback(engine.shutdown)
        app = build_app(engine, config, engine.config)
        concurrency = args.max_concurrency or 2 * (engine.config.scheduler.max_num_seqs or HTTP_CONCURRENCY)

        async def run() -> "BatchRunner":
            async with serving_metrics(app, sock):
                return await _run_batch(args.input_file, config, InProcess(app, engine), output, concurrency)

        return asyncio.run(run())


async def _run_batch(
    file: Path, config: "ServerConfig", sender: "Sender", output: "BatchOutput", concurrency: int
) -> "BatchRunner":
    from quire.entrypoints.cli.batch_input import read_requests
    from quire.entrypoints.cli.batch_runner import BatchRunner

    runner = BatchRunner(sender, output, concurrency, len(output.offsets))
    await runner.run(read_requests(file, config.max_request_bytes))
    return runner


def _report(runner: "BatchRunner", count: int, seconds: float, file: Path) -> None:
    failed = f", {runner.num_failed} failed (first: {runner.first_failure})" if runner.num_failed else ""
    print(f"quire: {count} requests in {seconds:.1f} s{failed}; results in {file}", file=sys.stderr)
