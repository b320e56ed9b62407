"""Write docs/vllm_tests.md from reports of vLLM's own online tests.

python -m scripts.vllm_tests_page REPORT.json... [--version COMMIT]

A test that several reports name counts as passed if it passed in one (with one stand-in, say), else as in the last.
What the page says of files that no report names stays.
"""

import argparse
import fnmatch
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.vllm_placeholders import PLACEHOLDER

PAGE = Path(__file__).parents[1] / "docs" / "vllm_tests.md"
REASONS = {  # by the test's name, as a pattern
    "*test_chat.py::test_more_than_one_prompt_logprobs_chat*": (
        "stand-in",
        "its fourth prompt token is not the likeliest",
    ),
    "*test_chat.py::test_single_chat_session*": ("stand-in", "another vocabulary: the prompt has other than 37 tokens"),
    "*test_chat.py::test_structured_outputs_*": (
        "stand-in",
        "repeats itself: its JSON does not end, or is the same twice",
    ),
    "*test_chat.py::test_response_format_json_object*": ("stand-in", "answers in JSON, but not with the sum"),
    "*test_chat.py::test_response_format_json_schema*": ("stand-in", "its number does not end in time"),
    "*test_chat.py::test_complex_message_content*": ("stand-in", "does not answer with the sum alone"),
    "*test_chat.py::test_custom_role*": ("stand-in", "its greedy answers run to the end of the context"),
    "*test_completion.py::test_single_completion*": (
        "stand-in",
        "another vocabulary, without a token that begins texts",
    ),
    "*::test_completion_streaming*": ("stand-in", "ends its answer before the fifth token"),
    "*test_return_token_ids.py::test_chat_completion_with_tool_use*": ("stand-in", "does not call the tool"),
    "*test_return_token_ids.py::test_comparison_with_prompt*": ("stand-in", "answers with nothing but the end token"),
    "*test_include_reasoning.py::*": ("stand-in", "does not end its reasoning within 200 tokens"),
    "*::test_function_tool_use*": ("stand-in", "does not end its reasoning, or calls nothing, where it is free to"),
    "*::test_named_tool_use*": ("stand-in", "gives the same name twice"),
    "*test_thinking_token_budget.py::*": ("stand-in", "does not think"),
    "*test_run_batch.py::test_reasoning_parser*": ("stand-in", "does not think"),
    "*test_run_batch.py::test_tool_calling*": ("stand-in", "does not call the tool"),
    "*::test_completions_with_prompt_embeds*": ("stand-in", "answers with nothing but the end token"),
    "*::test_completions_with_logprobs_and_prompt_embeds*": ("stand-in", "answers with nothing but the end token"),
    "*::test_prompt_logprobs_raises_error*": ("differs", "`prompt_logprobs: true` is refused for not being a number"),
    "*test_models.py::test_check_models*": ("to come", "LoRA; the name of the stand-in's files is another, too"),
    "*::test_chat_return_tokens_as_token_ids_completion*": ("stand-in", "its tokens end within a character"),
    "*test_chat.py::test_chat_streaming*": ("stand-in", "ends its answer before the last token"),
    "*test_run_batch.py::test_embeddings*": ("to come", "embeddings over HTTP"),
    "*test_run_batch.py::test_score*": ("to come", "scores over HTTP"),
    "*test_run_batch.py::test_trans*": ("to come", "speech"),
    "*::test_metrics_exist_run_batch*": ("to come", "embeddings over HTTP"),
    "*::test_generate_sampling_mask*": ("to come", "`--return-sampling-mask`"),
    "*::test_v2_endpoint_accepts_valid_api_token*": ("to come", "Cohere's API for embeddings"),
    "anthropic/*::test_anthropic_tool_call": ("stand-in", "does not call the tool where it is free to"),
    "*responses/test_basic.py::*": ("stand-in", "does not know the product"),
    "*responses/test_function_call.py::*": ("stand-in", "calls nothing, or another tool, where it is free to"),
    "*responses/test_parsable_context.py::*": ("to come", "tools of the server (`--tool-server`)"),
    "*responses/test_simple.py::*reasoning*": ("stand-in", "does not think, or does not end its reasoning"),
    "*responses/test_stateful.py::*": ("stand-in", "does not remember the name it was told"),
    "*responses/test_structured_output.py::*": ("stand-in", "follows the schema, but reads the text wrongly"),
    "*::test_no_request_id_header*": ("differs", "every response names its request in `X-Request-Id`"),
    "*test_shutdown.py::test_wait_timeout_completes_requests*": (
        "stand-in",
        "200 tokens take longer than the ten seconds that the test's random model of a few layers has",
    ),
}
KINDS = {
    "stand-in": "the small model that stands in cannot do what the test needs",
    "to come": "needs a feature that is not there yet",
    "differs": "differs on purpose",
    "open": "not mended yet",
}
INTRO = """\
# vLLM's own online tests

The tests in vLLM's repository that talk to a server over HTTP or run a command, run unchanged against `quire serve`
with SmolLM2-135M in place of every model that they name: as it is, and as a copy that `python -m scripts.vllm_stand_in`
has trained for some minutes to write tool calls and reasoning. A test that passes with one of them counts as passed;
tests of vLLM's own classes are not counted. Made by `python -m scripts.vllm_tests_page` from what
`python -m scripts.vllm_online_tests` reports. Files are run again as features come: those of `anthropic/` and of
`openai/responses/` were last, others before adapters, embeddings and scores were there. Left out are those of gpt-oss's
own format (`test_harmony.py`, `test_mcp_tools.py`), which need its library.
"""


@dataclass
class Outcomes:
    """What the page has: by file how many passed, which failed and why, and how many were not run and why."""

    passed: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    not_run: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def files(self) -> list[str]:
        return sorted({*self.passed, *map(file_of, self.failed), *(file for file, _ in self.not_run)})

    def without(self, files: Sequence[str]) -> "Outcomes":
        return Outcomes(
            Counter({file: count for file, count in self.passed.items() if file not in files}),
            {test: why for test, why in self.failed.items() if file_of(test) not in files},
            Counter({(file, why): count for (file, why), count in self.not_run.items() if file not in files}),
        )

    def plus(self, other: "Outcomes") -> "Outcomes":
        return Outcomes(self.passed + other.passed, self.failed | other.failed, self.not_run + other.not_run)


def reason(test: str) -> str:
    found = next((why for pattern, why in REASONS.items() if fnmatch.fnmatchcase(test, pattern)), ("open", "?"))
    return ": ".join(found)


def of_reports(files: Sequence[Path]) -> Outcomes:
    outcomes: dict[str, tuple[str, str]] = {}
    passed: dict[str, tuple[str, str]] = {}
    for file in files:
        report = json.loads(file.read_text())
        outcomes |= {test: ("failed", reason(test)) for test in report["failed"]}
        skipped = {test: why for test, why in report["skipped"].items() if not why.startswith(PLACEHOLDER)}
        last = {test: why.strip().splitlines()[-1] for test, why in skipped.items()}
        outcomes |= {test: ("not run", why.replace(f"{sys.executable} -m ", "")) for test, why in last.items()}
        passed |= dict.fromkeys(report["passed"], ("passed", ""))
    outcomes |= passed
    return Outcomes(
        Counter(file_of(test) for test, (kind, _) in outcomes.items() if kind == "passed"),
        {test: why for test, (kind, why) in outcomes.items() if kind == "failed"},
        Counter((file_of(test), why) for test, (kind, why) in outcomes.items() if kind == "not run"),
    )


def of_page(text: str) -> Outcomes:
    counts = re.findall(r"^\| `([^`:]+)` \| (\d+) \| \d+ \| \d+ \|$", text, re.MULTILINE)
    failed = re.findall(r"^\| `([^`]+::[^`]+)` \| (.+) \|$", text, re.MULTILINE)
    not_run = re.findall(r"^\| (\d+) of `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    return Outcomes(
        Counter({file: int(passed) for file, passed in counts}),
        {test.replace("\\|", "|"): why for test, why in failed},
        Counter({(file, why): int(count) for count, file, why in not_run}),
    )


def page(outcomes: Outcomes, version: str) -> str:
    passed, failed = outcomes.passed, Counter(map(file_of, outcomes.failed))
    not_run = Counter(file for file, _ in outcomes.not_run.elements())
    kinds = Counter(why.partition(":")[0] for why in outcomes.failed.values())
    tried = passed.total() + failed.total()
    lines = [
        INTRO,
        f"vLLM's repository at {version}: {passed.total()} of {tried} pass; {not_run.total()} were not run.",
    ]
    lines += ["", "| file of `tests/entrypoints` | passed | failed | not run |", "|---|---|---|---|"]
    lines += [f"| `{file}` | {passed[file]} | {failed[file]} | {not_run[file]} |" for file in outcomes.files]
    lines += ["", "## Failed", "", "| reason | tests | |", "|---|---|---|"]
    lines += [f"| {kind} | {kinds[kind]} | {about} |" for kind, about in KINDS.items() if kinds[kind]]
    lines += ["", "| test | reason |", "|---|---|"]
    lines += [f"| `{test.replace('|', chr(92) + '|')}` | {why} |" for test, why in sorted(outcomes.failed.items())]
    lines += ["", "## Not run", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} of `{file}` | {why} |" for (file, why), count in sorted(outcomes.not_run.items())]
    return "\n".join(lines) + "\n"


def file_of(test: str) -> str:
    return test.partition("::")[0]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--version", default="main", help="the checkout's commit")
    args = parser.parse_args(argv)
    new = of_reports(args.reports)
    outcomes = of_page(PAGE.read_text()).without(new.files).plus(new)
    PAGE.write_text(page(outcomes, args.version))
    print(f"{new.passed.total()} of {new.passed.total() + len(new.failed)} passed: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
