"""`quire generate`: continue prompts with a model and print the result as text or JSON lines."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.flags import (
    FlagParser,
    add_engine_flags,
    add_model_argument,
    engine_kwargs,
    number,
    whole_number,
)

if TYPE_CHECKING:
    from quire import RequestOutput

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos", "logprobs")
# `--seed` is the sampling seed here: it already makes the output repeatable, so the engine's base seed needs no flag.
TAKEN = ("seed",)


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire generate",
        description="Continue prompts. Without --prompt or --prompts-file, each line of standard input is a prompt.",
    )
    add_model_argument(parser)
    source = parser.add_argument_group("Prompts and output")
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument("--prompts-file", type=Path, metavar="FILE", help="a file with one prompt per line")
    source.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    _add_sampling_flags(parser)
    add_engine_flags(parser, leave_out=TAKEN)
    return parser


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    from quire import LLM, SamplingParams

    params = SamplingParams(**{name: getattr(args, name) for name in SAMPLING if hasattr(args, name)})
    llm = LLM(**engine_kwargs(args, leave_out=TAKEN))
    try:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    finally:
        llm.shutdown()
    if args.json:
        print("\n".join(json.dumps(as_json(output), ensure_ascii=False) for output in outputs))
    else:
        print("\n\n".join(output.outputs[0].text for output in outputs))
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print(f"quire: error: prompt {output.prompt!r} failed: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt and args.prompts_file:
        raise ValueError("both --prompt and --prompts-file are given; give one of them")
    if args.prompt:
        return args.prompt
    if args.prompts_file:
        source, text = str(args.prompts_file), args.prompts_file.read_text(encoding="utf-8")
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt; give --prompt TEXT, --prompts-file FILE, or lines on standard input")
    else:
        source, text = "standard input", sys.stdin.read()
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{source} holds no prompt; write one per line, or give --prompt TEXT")
    return prompts


def as_json(output: "RequestOutput") -> dict[str, Any]:
    completion = output.outputs[0]
    fields: dict[str, Any] = {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [
            {str(token): entry.logprob for token, entry in position.items()} for position in completion.logprobs
        ]
    if output.error is not None:
        fields["error"] = output.error
    return fields


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sampling")

    def add(name: str, help: str, **kwargs: Any) -> None:
        group.add_argument(name, default=argparse.SUPPRESS, help=help, **kwargs)

    add("--temperature", "0 is greedy (default: 1.0)", type=number, metavar="X")
    add("--top-p", "keep the likeliest tokens up to this probability (default: 1.0)", type=number, metavar="X")
    add("--top-k", "keep this many of the likeliest tokens; 0: all (default: 0)", type=whole_number, metavar="N")
    add("--min-p", "drop tokens below this part of the likeliest (default: 0.0)", type=number, metavar="X")
    add("--seed", "makes sampling repeatable", type=whole_number, metavar="N")
    add("--max-tokens", "most tokens to generate per prompt (default: 16)", type=whole_number, metavar="N")
    add("--ignore-eos", "go on to --max-tokens even past the end of the text", action="store_true")
    add("--logprobs", "with --json: logprobs of the N likeliest tokens per position", type=whole_number, metavar="N")
