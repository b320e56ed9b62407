"""Run vLLM's own online tests, read from a checkout of its repository, against our server.

python -m scripts.vllm_online_tests CHECKOUT [tests/entrypoints/openai/...] [--model MODEL] [--report FILE.json]

A small chat model stands in for every model the tests name; `pytest_asyncio` must be importable. Tests of vLLM's own
classes are skipped: what these tests import from `vllm` are placeholders. Nothing of the checkout is changed.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from quire import __version__
from quire.checkpoint.resolve import resolve_model

FILES = (
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
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/test_async_tokenization.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "scale_out/render/test_render.py",
    "scale_out/token_in_token_out/test_serving_tokens.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/instrumentator/test_uds.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
)
SECONDS = 240  # for a server to start, and for one answer
PLACEHOLDER = "a test of vLLM's own classes"


class StandIn:
    """The model that replaces those of the tests, and how our server is started with it."""

    def __init__(self, model: str | None, flags: Sequence[str], leave_out: Sequence[str], log: Path) -> None:
        self.model, self.flags, self.leave_out, self.log = model, list(flags), frozenset(leave_out), log
        self._tokenizer: Any = None

    def tokenizer(self, *_: Any, **__: Any) -> Any:
        if self._tokenizer is None:
            import transformers

            path = resolve_model(self.model).path
            file = {"gguf_file": path.name} if path.is_file() else {}
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent if file else path, **file)
        return self._tokenizer

    def command(self, name: str, given: Sequence[str], port: int) -> list[str]:
        model = [self.model] if self.model is not None else []
        flags = [*self._kept(given), *self.flags]
        served = [] if "--served-model-name" in flags else ["--served-model-name", name]
        port_flags = [] if "--uds" in flags else ["--port", str(port)]
        return [sys.executable, "-m", "quire", "serve", *model, *served, *port_flags, *flags]

    def _kept(self, given: Sequence[str]) -> Iterator[str]:
        skipping = False
        for word in given:
            if word.startswith("-"):
                skipping = word.partition("=")[0] in self.leave_out
            if not skipping:
                yield word


class RemoteServer:
    """The methods of vLLM's RemoteOpenAIServer that its tests call, over `quire serve`."""

    DUMMY_API_KEY = "token-abc123"
    stand_in: StandIn

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        given = list(vllm_serve_args)
        self.uds = given[given.index("--uds") + 1] if "--uds" in given else None
        self.host, self.port = ("127.0.0.1", _free_port()) if self.uds is None else (None, None)
        if not auto_port:
            self.port = int(given[given.index("--port") + 1])
            del given[given.index("--port") : given.index("--port") + 2]
        self.show_hidden_metrics = any("show-hidden-metrics" in word for word in given)
        seeds = ["--seed", str(seed)] if seed is not None else []
        command = self.stand_in.command(model, [*given, *seeds], self.port or 0)
        with self.stand_in.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            environ = os.environ | (env_dict or {})
            self.proc = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            self._wait(max_wait_seconds or SECONDS)
        except BaseException:
            self.__exit__()
            raise

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.proc.poll() is not None:
                last = self.stand_in.log.read_text(errors="replace").splitlines()[-3:]
                raise RuntimeError(f"the server did not start: {' | '.join(last)}")
            if self._answers():
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server was not ready after {seconds:g} s")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            if self.uds is not None:
                with socket.socket(socket.AF_UNIX) as one:
                    one.connect(self.uds)
                return True
            with urllib.request.urlopen(self.url_for("health"), timeout=5) as response:
                return bool(response.status == 200)
        return False

    def __enter__(self) -> "RemoteServer":
        return self

    def __exit__(self, *_: object) -> None:
        if self.proc.poll() is None:
            self.proc.terminate()
            try:
                self.proc.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.proc.pid, signal.SIGKILL)  # a group of its own
                self.proc.wait(10)

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}" if self.uds is None else "http://localhost"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **kwargs: Any) -> Any:
        import openai

        return openai.OpenAI(**self._client(kwargs))

    def get_async_client(self, **kwargs: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._client(kwargs))

    def _client(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        common = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return common | {"timeout": SECONDS} | kwargs


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Placeholder:
    """A name that tests import from vLLM; a test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"{PLACEHOLDER}: {self._name}")

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False  # environment variables, and questions about the platform

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class PlaceholderModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Error"):
            value: Any = type(name, (Exception,), {})
        else:
            value = Placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of packages that are not installed: vLLM itself, and what only its own classes need."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


def install(checkout: Path, stand_in: StandIn) -> None:
    """Make `vllm` and the tests' helpers importable without vLLM."""
    missing = [
        name for name in ("vllm", "fastapi", "pybase64", "model_hosting_container_standards") if not _found(name)
    ]
    sys.meta_path.insert(0, Placeholders(missing))
    import transformers
    import vllm.config
    import vllm.config.utils
    import vllm.platforms
    import vllm.tokenizers
    import vllm.utils.network_utils
    import vllm.v1.engine.detokenizer
    import vllm.version

    class ModelConfig:
        def __init__(self, **_: Any) -> None: ...

        def get_vocab_size(self) -> int:
            return len(stand_in.tokenizer())

    def getattr_iter(holder: Any, names: Sequence[str], default: Any = None, **_: Any) -> Any:
        return next((getattr(holder, name) for name in names if hasattr(holder, name)), default)

    def check_stop_strings(text: str, new: int, stop: Sequence[str], include: bool) -> tuple[str, int] | None:
        found = [(text.find(one), one) for one in stop if one in text]
        return (found[0][1], found[0][0]) if found else None

    replaced: tuple[tuple[Any, dict[str, Any]], ...] = (
        (vllm.config, {"ModelConfig": ModelConfig}),
        (vllm.config.utils, {"getattr_iter": getattr_iter}),
        (vllm.platforms, {"current_platform": _Platform()}),
        (vllm.tokenizers, {"get_tokenizer": stand_in.tokenizer}),
        (vllm.utils.network_utils, {"get_open_port": _free_port}),
        (vllm.v1.engine.detokenizer, {"check_stop_strings": check_stop_strings}),
        (vllm.version, {"__version__": __version__, "_prev_minor_version": lambda: "0.0"}),
    )
    for module, names in replaced:
        for name, value in names.items():
            setattr(module, name, value)
    stand_in.tokenizer()
    transformers.AutoTokenizer.from_pretrained = stand_in.tokenizer
    RemoteServer.stand_in = stand_in
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    tests = ModuleType("tests")
    tests.__path__ = [str(checkout / "tests")]
    helpers, conftest = PlaceholderModule("tests.utils"), PlaceholderModule("tests.conftest")
    helpers.RemoteOpenAIServer = helpers.RemoteLaunchRenderServer = RemoteServer
    helpers.ROCM_EXTRA_ARGS = []
    sys.modules |= {"tests": tests, "tests.utils": helpers, "tests.conftest": conftest}


def _found(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name) is not None


class Report:
    """Outcomes by test, written after each of them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    @pytest.fixture
    def local_asset_server(self) -> None:
        """Serves images to tests of multimodal models."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function = getattr(item, "function", None)
            online = "server" in getattr(item, "fixturenames", ()) or "RemoteOpenAIServer" in inspect.getsource(
                function
            )
            if not online:
                item.add_marker(pytest.mark.skip(PLACEHOLDER))

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
    parser.add_argument("--leave-out", action="append", default=[], help="flag of the tests that is not passed on")
    parser.add_argument("--report", type=Path, default=Path("vllm_online_tests.json"))
    parser.add_argument("-k", default="", help="pytest's -k")
    args = parser.parse_args(argv)
    checkout = args.checkout.resolve()
    if not (checkout / "tests" / "entrypoints").is_dir():
        parser.error(f"{checkout} has no tests/entrypoints; give the root of a checkout of vLLM")
    if not _found("pytest_asyncio"):
        parser.error("pytest_asyncio is not installed; vLLM's tests need it")
    log = args.report.with_suffix(".log").resolve()
    install(checkout, StandIn(args.model, args.server_flag, args.leave_out, log))
    files = [str(checkout / "tests" / "entrypoints" / name) for name in args.tests or FILES]
    options = ["-c", os.devnull, f"--rootdir={checkout}", "--noconftest", "-p", "no:cacheprovider", "-q"]
    options += ["-p", "tests.entrypoints.conftest", "--tb=short"]
    options += ["-k", args.k] if args.k else []
    report = Report(args.report)
    pytest.main([*options, *files], plugins=[report])
    print(f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.skipped)} skipped: {args.report}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
