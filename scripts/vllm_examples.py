"""Run vLLM's own example programs with Quire: imports and model names are replaced, nothing else.

    .venv/bin/python scripts/vllm_examples.py CHECKOUT [--only TEXT] [--model MODEL] [--port 8000] [--keep FOLDER]

CHECKOUT is a clone of vLLM, or its git directory. Prints a line for each program: ok, or the last line of its error;
the exit status is the number of failures. Only programs that need no feature which Quire lacks are listed.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^(\s*(?:from|import)\s+)vllm\b", re.MULTILINE)
HUB_ID = re.compile(r"([\"'])(?:facebook|google|lmsys|meta-llama|mistralai|NousResearch|Qwen)/[\w.-]+\1")
SECONDS = 600


@dataclass(frozen=True)
class Example:
    path: str  # under examples/
    arguments: tuple[str, ...] = ()
    model: str | None = None  # a flag that names the model, where the program takes it from the command line


OFFLINE = (
    Example("basic/offline_inference/basic.py"),
    Example("basic/offline_inference/chat.py", ("--max-tokens", "16", "--max-model-len", "512")),
    Example("basic/offline_inference/generate.py", ("--max-tokens", "16", "--max-model-len", "512")),
    Example("deployment/async_llm_streaming.py"),
    Example("deployment/llm_engine_example.py", ("--max-model-len", "512"), "--model"),
    Example("features/automatic_prefix_caching/automatic_prefix_caching_offline.py"),
    Example("features/automatic_prefix_caching/prefix_caching_offline.py"),
    Example("features/batch_invariance/reproducibility_offline.py"),
    Example("features/logits_processor/custom.py"),
    Example("features/logits_processor/custom_req.py"),
    Example("features/logits_processor/custom_req_init.py"),
    Example("features/profiling/run_one_batch_offline.py", ("--profile", "both", "--profile-dir", "profiles")),
    Example("features/profiling/simple_profiling_offline.py"),
    Example("features/reset_kv/reset_kv_offline.py", ("--max-model-len", "1024"), "--model"),
    Example("features/structured_outputs/structured_outputs_offline.py"),
    Example("observability/metrics/offline.py"),
)
ONLINE = (
    Example("basic/online_serving/openai_chat_completion_client.py"),
    Example("basic/online_serving/openai_chat_completion_client.py", ("--stream",)),
    Example("basic/online_serving/openai_completion_client.py"),
    Example("basic/online_serving/openai_completion_client.py", ("--stream",)),
    Example("features/structured_outputs/structured_outputs_client.py", ("--constraint", "choice", "regex", "json")),
    Example("features/structured_outputs/structured_outputs_client.py", ("--stream", "--constraint", "grammar")),
    Example("generate/batched_chat_completions_online.py"),
    Example("tool_calling/openai_chat_completion_client_with_tools_required.py"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="programs with this in their path")
    parser.add_argument("--model", help="folder or file; default: the embedded model")
    parser.add_argument("--port", type=int, default=8000, help="of the server; the clients' 8000 is replaced by it")
    parser.add_argument("--keep", type=Path, help="where the programs and their outputs are kept")
    parser.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[], help="of `quire serve`, all that follow"
    )
    args = parser.parse_args()
    model = args.model or embedded_model()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        copy_examples(args.checkout, folder, model, args.port)
        failed = run_all([e for e in OFFLINE if args.only in e.path], folder, model)
        online = [e for e in ONLINE if args.only in e.path]
        if online:
            with server(model, args.port, folder, args.server_flags):
                failed += run_all(online, folder, model)
    return failed


def embedded_model() -> str:
    from quire.checkpoint.resolve import resolve_model

    return str(resolve_model(None).path)


def copy_examples(checkout: Path, folder: Path, model: str, port: int) -> None:
    paths = sorted({f"examples/{example.path}" for example in (*OFFLINE, *ONLINE)})
    archive = subprocess.run(["git", "-C", checkout, "archive", "HEAD", *paths], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    for path in paths:
        file = folder / path
        text = IMPORT.sub(r"\g<1>quire", file.read_text(encoding="utf-8"))
        text = HUB_ID.sub(lambda found: repr(model), text)
        file.write_text(text.replace("localhost:8000", f"localhost:{port}"), encoding="utf-8")


def run_all(examples: Sequence[Example], folder: Path, model: str) -> int:
    failed = 0
    for number, example in enumerate(examples):
        began = time.monotonic()
        arguments = [*example.arguments, *((example.model, model) if example.model else ())]
        command = [sys.executable, str(folder / "examples" / example.path), *arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=SECONDS
            )
            (folder / f"{number}-{Path(example.path).stem}.log").write_text(done.stdout + done.stderr)
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            result = "ok" if done.returncode == 0 else f"FAILED: {last}"
        except subprocess.TimeoutExpired:
            result = f"FAILED: not done within {SECONDS} seconds"
        failed += result != "ok"
        shown = " ".join([example.path, *example.arguments])
        print(f"{shown}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return failed


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}


@contextmanager
def server(model: str, port: int, folder: Path, flags: Sequence[str]):  # type: ignore[no-untyped-def]
    command = [
        sys.executable,
        "-m",
        "quire.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        str(port),
        *flags,
    ]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen([*command, *flags], cwd=folder, env=environment(), stdout=log, stderr=log)
        try:
            wait_for(f"http://localhost:{port}/health", process)
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server does not answer at {url}")


if __name__ == "__main__":
    sys.exit(main())
