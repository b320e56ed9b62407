"""`quire generate`: continue prompts with a model and write the results as text or JSON lines."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument
from quire.entrypoints.cli import start
from quire.entrypoints.cli.prompts import FORMATS, BadLine, Task, read_tasks
from quire.entrypoints.cli.sampling_flags import add_sampling_flags, sampling_params, with_values

if TYPE_CHECKING:
    from quire.engine.input_processor import ParsedPrompt
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.messages.sampling_params import SamplingParams

# `--seed` is the sampling seed here: it makes the output repeatable, so the engine's base seed needs no flag.
RESERVED_FLAGS = ("seed",)


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire generate",
        description="Continue prompts. Without --prompt or --prompts-file, each line of standard input is a prompt. "
        "A line of JSON lines is an object with prompt, prompt_token_ids or messages, and sampling parameters that "
        "override the flags.",
    )
    add_model_argument(parser)
    source = parser.add_argument_group("Prompts and output")
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument(
        "--prompts-file", action="append", type=Path, metavar="FILE", help="a file of lines; may be given several times"
    )
    source.add_argument(
        "--input-format",
        choices=FORMATS,
        default="auto",
        help="line format (default: auto, by name and first line)",
    )
    source.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="for an invalid line: run nothing, or skip it (default: stop)",
    )
    source.add_argument("--output", type=Path, metavar="FILE", help="write here instead of standard output")
    source.add_argument("--json", action="store_true", help="write JSON lines; also if --output ends in .jsonl")
    add_sampling_flags(parser)
    add_engine_flags(parser, leave_out=RESERVED_FLAGS)
    return parser


def run(args: argparse.Namespace) -> int:
    tasks = read_tasks(args.prompt, args.prompts_file, args.input_format)
    params = sampling_params(args)
    job = Job(tasks, skip_errors=args.on_error == "skip")
    job.check(params)
    as_json = args.json or (args.output is not None and args.output.suffix == ".jsonl")
    with contextlib.ExitStack() as stack:
        out: IO[str] = sys.stdout
        if args.output is not None:
            out = stack.enter_context(args.output.open("w", encoding="utf-8"))
        engine = start.start_engine(args, leave_out=RESERVED_FLAGS)
        stack.callback(engine.shutdown)
        if engine.config.model.default_sampling:
            job.check(sampling_params(args, **engine.config.model.default_sampling))
        # Results on a terminal show the progress themselves, and would break the bar.
        show_progress = sys.stderr.isatty() and not out.isatty()
        for index, (task, output) in enumerate(job.run(engine, show_progress)):
            if as_json:
                out.write(json.dumps(as_object(task, output), ensure_ascii=False) + "\n")
            else:
                texts = [completion.text for completion in output.outputs]
                out.write(("\n" if index else "") + "\n\n".join(texts) + "\n")
            out.flush()
    return 1 if job.failed else 0


class Job:
    """Runs tasks through an engine. Results are in the order of the tasks, each as early as possible."""

    def __init__(self, tasks: list[Task | BadLine], skip_errors: bool) -> None:
        self.skip_errors = skip_errors
        self.failed = False
        self.tasks = [task for task in tasks if isinstance(task, Task)]
        for bad in tasks:
            if isinstance(bad, BadLine):
                self._refuse(bad.where, bad.problem)

    def check(self, params: "SamplingParams") -> None:
        """Set each task's parameters; invalid ones fail before the model is loaded."""
        self.params: dict[int, SamplingParams] = {}
        for task in self.tasks:
            try:
                self.params[id(task)] = with_values(params, task.params) if task.params else params
            except ValueError as error:
                self._refuse(task.where, str(error))
        self.tasks = [task for task in self.tasks if id(task) in self.params]

    def run(self, engine: "LLMEngine", show_progress: bool) -> "Iterator[tuple[Task, RequestOutput]]":
        from quire.messages.sampling_params import RequestOutputKind

        self._add_to(engine, RequestOutputKind.FINAL_ONLY)
        done: dict[str, RequestOutput] = {}
        written = 0
        with _progress(len(self.tasks), show_progress) as advance:
            while written < len(self.tasks):
                for output in engine.step():
                    done[output.request_id] = output
                    advance(output)
                while str(written) in done:
                    output = done.pop(str(written))
                    if output.error is not None:
                        self.failed = True
                        _print_error(f"{self.tasks[written].where} failed: {output.error}")
                    yield self.tasks[written], output
                    written += 1

    def _add_to(self, engine: "LLMEngine", kind: Any) -> None:
        prompts = self._parse(engine)
        accepted: list[Task] = []
        for task in self.tasks:
            try:
                if id(task) not in prompts:
                    prompts[id(task)] = self._parse_one(engine, task)
                params = self.params[id(task)].replace(output_kind=kind)
                engine.add_request(str(len(accepted)), prompts[id(task)], params)
                accepted.append(task)
            except ValueError as error:
                self._refuse(task.where, str(error))
        self.tasks = accepted

    def _parse(self, engine: "LLMEngine") -> "dict[int, ParsedPrompt]":
        """Tokenizes all texts in one batch, which uses all cores; if one is invalid, each is parsed alone later."""
        plain = [task for task in self.tasks if task.messages is None]
        try:
            parsed = engine.input_processor.parse_many([_prompt(task) for task in plain])
        except ValueError:
            return {}
        return {id(task): one for task, one in zip(plain, parsed, strict=True)}

    def _parse_one(self, engine: "LLMEngine", task: Task) -> "ParsedPrompt":
        if task.messages is None:
            return engine.input_processor.parse(_prompt(task))
        if not hasattr(self, "renderer"):
            self.renderer = start.chat_renderer(engine)
        [prompt] = self.renderer.prompts([task.messages], tools=task.tools)
        prompt.cache_salt = task.cache_salt
        return prompt

    def _refuse(self, where: str, problem: str) -> None:
        if not self.skip_errors:
            raise ValueError(f"{where}: {problem}")
        self.failed = True
        _print_error(f"{where}: {problem}")


def as_object(task: Task, output: "RequestOutput") -> dict[str, Any]:
    """A result as a line of JSON; with several completions, `outputs` holds all and the top level the first."""
    fields: dict[str, Any] = {} if task.id is None else {"id": task.id}
    fields["prompt"] = output.prompt
    fields |= _completion(output.outputs[0])
    fields["num_prompt_tokens"] = len(output.prompt_token_ids or ())
    fields["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [None if entry is None else _logprobs(entry) for entry in output.prompt_logprobs]
    if len(output.outputs) > 1:
        fields["outputs"] = [_completion(completion) for completion in output.outputs]
    if output.error is not None:
        fields["error"] = output.error
    return fields


def _completion(completion: "CompletionOutput") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [_logprobs(position) for position in completion.logprobs]
    return fields


def _logprobs(position: dict[int, Any]) -> dict[str, float]:
    return {str(token): entry.logprob for token, entry in position.items()}


def _prompt(task: Task) -> Any:
    if task.cache_salt is None:
        return task.prompt
    form = "prompt" if isinstance(task.prompt, str) else "prompt_token_ids"
    return {form: task.prompt, "cache_salt": task.cache_salt}


def _print_error(problem: str) -> None:
    print(f"quire: error: {problem}", file=sys.stderr)


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    """A progress bar with tok/s and the remaining time."""
    if not show:
        yield lambda output: None
        return
    from quire.entrypoints.llm_inputs import Progress

    bar = Progress(total, "Generating")
    try:
        yield bar.update
    finally:
        bar.close()
