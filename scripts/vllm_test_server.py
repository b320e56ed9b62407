"""The server under vLLM's own online tests: `quire serve` with a small model in place of the one a test names."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.checkpoint.resolve import resolve_model
from quire.config.vllm.table import TABLE

SECONDS = 240  # for a server to start, and for one answer
POSITIONS = 8192  # of the embedded model; a longer context needs no sense
DROP_IN = ("--metrics-prefix", "vllm", "--error-format", "vllm")
MODULES = {
    "vllm/entrypoints/launchers/api_server/entry.py": "serve",
    "vllm/entrypoints/openai/run_batch.py": "run-batch",
}
LORA_FLAGS = ("--enable-lora", "--lora-modules", "--lora-module", "--max-lora-rank", "--max-cpu-loras")
LORA_TO_COME = TABLE["enable_lora"].status == "not yet"


class StandIn:
    """The model that replaces those of the tests, and how our server is started with it."""

    def __init__(self, model: str | None, flags: Sequence[str], log: Path) -> None:
        self.model, self.flags, self.log = model, list(flags), log
        left_out = ("--dtype", "--runner", *(LORA_FLAGS if LORA_TO_COME else ()))  # half precision is slow on a CPU
        self.left_out = frozenset(left_out)
        self._tokenizer: Any = None

    def tokenizer(self, *_: Any, **__: Any) -> Any:
        if self._tokenizer is None:
            import transformers

            folder, file = self._files()
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
        return self._tokenizer

    def embeddings(self, prompts: Sequence[str]) -> list[Any]:
        """Of the prompts' tokens, as transformers looks them up."""
        import transformers

        folder, file = self._files()
        table = transformers.AutoModelForCausalLM.from_pretrained(folder, **file).get_input_embeddings()
        return [table(self.tokenizer()(one, return_tensors="pt").input_ids).squeeze(0).detach() for one in prompts]

    def _files(self) -> tuple[Path, dict[str, str]]:
        path = resolve_model(self.model).path
        return (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})

    def command(self, name: str, given: Sequence[str], port: int) -> list[str]:
        flags = [*self._kept(given), *DROP_IN, *self.flags]
        if "--reasoning-parser" in flags:
            flags += ["--default-chat-template-kwargs", '{"enable_thinking": true}']  # of the template, not the default
        if any(int(after) > POSITIONS for word, after in itertools.pairwise(flags) if word == "--max-model-len"):
            flags += ["--hf-overrides", '{"max_position_embeddings": 32768}']
        served = [] if "--served-model-name" in flags else ["--served-model-name", name]
        port_flags = [] if "--uds" in flags else ["--port", str(port)]
        model = [self.model] if self.model is not None else []
        return [sys.executable, "-m", "quire", "serve", *model, *served, *port_flags, *flags]

    def vllm_command(self, folder: Path) -> None:
        """Put a program `vllm` into `folder`, and modules that tests run, that run our commands with the stand-in."""
        for name, command in MODULES.items():
            module = folder / name
            module.parent.mkdir(parents=True)
            module.write_text(f"from scripts.vllm_test_server import main\n\nmain({self.model!r}, {command!r})\n")
        folder = folder / "bin"
        folder.mkdir()
        program = folder / "vllm"
        program.write_text(f"#!{sys.executable}\nfrom scripts.vllm_test_server import main\n\nmain({self.model!r})\n")
        program.chmod(0o755)

    def _kept(self, given: Sequence[str]) -> Iterator[str]:
        skipping = False
        for word in given:
            if word.startswith("-"):
                skipping = word.partition("=")[0] in self.left_out
            if not skipping:
                yield word


def main(model: str | None, *command: str) -> None:
    """Run a command of vLLM's as ours, the stand-in in place of its --model."""
    words = [*command, *sys.argv[1:]]
    if "--reasoning-parser" in words:
        words += ["--default-chat-template-kwargs", '{"enable_thinking": true}']
    if "--model" in words:
        at = words.index("--model")
        words[at : at + 2] = ["--served-model-name", words[at + 1], *(["--model", model] if model else [])]
    os.execv(sys.executable, [sys.executable, "-m", "quire", *words])


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
        self.host, self.port = ("127.0.0.1", free_port()) if self.uds is None else (None, None)
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

    def _get_process_termination_timeout(self) -> float:
        return 15.0

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}" if self.uds is None else "http://localhost"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def get_client(self, **kwargs: Any) -> Any:
        import openai

        return openai.OpenAI(**self._client(kwargs))

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        import anthropic  # of the test extra

        kwargs = {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": SECONDS} | kwargs
        return anthropic.AsyncAnthropic(base_url=self.url_root, **kwargs)

    def get_async_client(self, **kwargs: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._client(kwargs))

    def _client(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        common = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return common | {"timeout": SECONDS} | kwargs


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
