"""Run vLLM's own online tests, read from a checkout of its repository, against our server.

python -m scripts.vllm_online_tests CHECKOUT [openai/...] [--model FOLDER] [--report FILE.json]

A small chat model stands in for every model the tests name (`python -m scripts.vllm_stand_in FOLDER` makes the one that
thinks and calls tools); `pytest_asyncio` must be importable. Tests of vLLM's own classes are skipped: what these tests
import from `vllm` are placeholders. Nothing of the checkout is changed. `python -m scripts.vllm_tests_page` makes
docs/vllm_tests.md of the reports.
"""

import argparse
import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.vllm_placeholders import PLACEHOLDER, found, install
from scripts.vllm_test_server import LORA_TO_COME, StandIn

FILES = (
    "anthropic/test_messages.py",
    "launchers/api_server/test_multi_api_servers.py",
    "launchers/test_shutdown.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_non_object_body_validation.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_completion_with_prompt_embeds.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_parsable_context.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_async_tokenization.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_run_batch.py",
    "scale_out/render/test_launch_render.py",
    "scale_out/render/test_render.py",
    "scale_out/token_in_token_out/test_serving_tokens.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/instrumentator/test_uds.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
)
ONLINE = ("RemoteOpenAIServer", "subprocess.Popen")
LORA, IMAGES = "to come: LoRA", "to come: images"


class Report:
    """Outcomes by test, written after each of them."""

    def __init__(self, file: Path, stand_in: StandIn) -> None:
        self.file, self.stand_in = file, stand_in
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    @pytest.fixture(scope="session")
    def hf_runner(self) -> Callable[[str], Any]:
        """Embeddings by transformers; its other methods belong to tests of other files."""
        runner = SimpleNamespace(get_prompt_embeddings=self.stand_in.embeddings)
        return lambda name: contextlib.nullcontext(runner)

    @pytest.fixture(scope="session")
    def opt125_lora_files(self) -> str:
        return "none"

    @pytest.fixture
    def local_asset_server(self) -> None:
        """Serves images to tests of multimodal models."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            source = inspect.getsource(item.function)
            client = any("server" in name or "client" in name for name in getattr(item, "fixturenames", ()))
            if not client and not any(word in source for word in ONLINE):
                item.add_marker(pytest.mark.skip(PLACEHOLDER))
            elif LORA_TO_COME and "lora" in item.name.replace("use-lora", ""):  # servers start without them
                item.add_marker(pytest.mark.skip(LORA))
            elif "multimodal" in item.name:
                item.add_marker(pytest.mark.skip(IMAGES))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("tests/entrypoints/")[2] or report.nodeid
        if report.skipped:
            where = report.longrepr
            self.skipped[name] = str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[name] = str(crash.message if crash is not None else report.longrepr)[:500]
        elif report.when == "call":
            self.passed.append(name)
        shape = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        self.file.write_text(json.dumps(shape, indent=1))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*", help="files under tests/entrypoints; default: those our features cover")
    parser.add_argument("--model", help="the stand-in; default: the embedded one")
    parser.add_argument("--server-flag", action="append", default=[], help="added to every server's command line")
    parser.add_argument("--report", type=Path, default=Path("vllm_online_tests.json"))
    parser.add_argument("-k", default="", help="pytest's -k")
    args = parser.parse_intermixed_args(argv)
    checkout = args.checkout.resolve()
    if not (checkout / "tests" / "entrypoints").is_dir():
        parser.error(f"{checkout} has no tests/entrypoints; give the root of a checkout of vLLM")
    if not found("pytest_asyncio"):
        parser.error("pytest_asyncio is not installed; vLLM's tests need it")
    log = args.report.with_suffix(".log").resolve()
    stand_in = StandIn(args.model, args.server_flag, log)
    install(checkout, stand_in)
    with tempfile.TemporaryDirectory() as folder:
        stand_in.vllm_command(Path(folder))
        os.environ["PATH"] = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
        os.environ["PYTHONPATH"] = f"{Path(__file__).parents[1]}{os.pathsep}{folder}"
        report = run(checkout, args.tests or FILES, Report(args.report, stand_in), args.k)
    print(f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.skipped)} skipped: {args.report}")
    return 1 if report.failed else 0


def run(checkout: Path, tests: Sequence[str], report: Report, chosen: str) -> Report:
    files = [str(checkout / "tests" / "entrypoints" / name) for name in tests]
    options = ["-c", os.devnull, f"--rootdir={checkout}", "--noconftest", "-p", "no:cacheprovider", "-q"]
    options += ["-p", "tests.entrypoints.conftest", "--tb=short"]
    options += ["-k", chosen] if chosen else []
    if any("/responses/" in name for name in tests):
        options += ["-p", "tests.entrypoints.openai.responses.conftest"]
    pytest.main([*options, *files], plugins=[report])
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
