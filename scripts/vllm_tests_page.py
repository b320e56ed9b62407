"""Write docs/vllm_tests.md from reports of vLLM's own online tests.

python -m scripts.vllm_tests_page REPORT.json... [--version COMMIT]

A test that several reports name counts as passed if it passed in one (with one stand-in, say), else as in the last.
"""

import argparse
import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Sequence
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
    "*::test_no_request_id_header*": ("differs", "every response names its request in `X-Request-Id`"),
    "*test_shutdown.py::test_wait_timeout_completes_requests*": (
        "stand-in",
        "200 tokens take longer than the ten seconds that the test's random model of a few layers has",
    ),
}
COLUMNS = ("passed", "failed", "not run")
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
`python -m scripts.vllm_online_tests` reports; the outcomes below are of one run with each, those of `test_run_batch.py`
and `test_render.py` of a second.
"""


def reason(test: str) -> tuple[str, str]:
    return next((why for pattern, why in REASONS.items() if fnmatch.fnmatchcase(test, pattern)), ("open", "?"))


def page(outcomes: dict[str, tuple[str, str]], version: str) -> str:
    """`outcomes`: by test, what it was and why."""
    counts = {kind: Counter(file_of(test) for test, (one, _) in outcomes.items() if one == kind) for kind in COLUMNS}
    failed = sorted(test for test, (kind, _) in outcomes.items() if kind == "failed")
    not_run = Counter((file_of(test), why) for test, (kind, why) in outcomes.items() if kind == "not run")
    kinds = Counter(reason(test)[0] for test in failed)
    passed, tried = counts["passed"].total(), counts["passed"].total() + len(failed)
    lines = [INTRO, f"vLLM's repository at {version}: {passed} of {tried} pass; {not_run.total()} were not run.", ""]
    lines += ["| file of `tests/entrypoints` | passed | failed | not run |", "|---|---|---|---|"]
    for file in sorted({file for counter in counts.values() for file in counter}):
        lines.append(f"| `{file}` | {' | '.join(str(counts[kind][file]) for kind in COLUMNS)} |")
    lines += ["", "## Failed", "", "| reason | tests | |", "|---|---|---|"]
    lines += [f"| {kind} | {kinds[kind]} | {about} |" for kind, about in KINDS.items() if kinds[kind]]
    lines += ["", "| test | reason |", "|---|---|"]
    lines += [f"| `{short(test)}` | {': '.join(reason(test))} |" for test in failed]
    lines += ["", "## Not run", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} of `{file}` | {why} |" for (file, why), count in sorted(not_run.items())]
    return "\n".join(lines) + "\n"


def file_of(test: str) -> str:
    return test.partition("::")[0]


def short(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{Path(file).name}::{name}".replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--version", default="main", help="the checkout's commit")
    args = parser.parse_args(argv)
    outcomes: dict[str, tuple[str, str]] = {}
    passed: dict[str, tuple[str, str]] = {}
    for file in args.reports:
        report = json.loads(file.read_text())
        outcomes |= {test: ("failed", why) for test, why in report["failed"].items()}
        skipped = {test: why for test, why in report["skipped"].items() if not why.startswith(PLACEHOLDER)}
        outcomes |= {test: ("not run", why) for test, why in skipped.items()}
        passed |= dict.fromkeys(report["passed"], ("passed", ""))
    outcomes |= passed
    PAGE.write_text(page(outcomes, args.version))
    print(f"{sum(kind == 'passed' for kind, _ in outcomes.values())} of {len(outcomes)} passed: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
