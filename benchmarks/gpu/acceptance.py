"""All that is to be shown on an H200, in parts of less than ten minutes each.

    python -m benchmarks.gpu.acceptance --list
    python -m benchmarks.gpu.acceptance tests latent --tar FILE.tar.gz [--output FOLDER] [--seconds 550]

Commands of a part run one after the other; what they print goes to FOLDER/PART.log, their results to files beside it. A
command that fails does not keep the next ones from running; one that runs out of time is ended. After each the folder
is packed into FILE.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable
SECONDS_TO_END = 20  # for a command to write what it has
LEFT_TO_NEXT = 60  # seconds of a part that a command leaves to each one after it
PRINTED_BYTES = 3000  # of the log of a command that failed
NEW_TESTS = [
    *("latent", "latent_kernels", "moe", "fp8_experts", "adapters", "encoders", "pooling"),
    *("kv_tier", "sleep", "connector", "batch_invariant"),
]
# They measure the memory of the whole device.
ALONE = {
    "sleep": "test_memory_is_given_back_and_graphs_stay_valid",
    "engine": "test_memory_stays_within_its_share",
    "draft_model": "test_memory_is_measured_with_the_draft",
}


@dataclass(frozen=True)
class Part:
    goal: str
    commands: tuple[str, ...]  # {out} is the folder


def tests(name: str, files: str, alone: list[str]) -> tuple[str, str]:
    single = [f"tests/gpu/test_{module}.py::{ALONE[module]}" for module in alone]
    without = " ".join(f"--deselect {one}" for one in single)
    return (
        f"-m benchmarks.gpu.side_by_side 8 {{out}}/{name} {files} {without}",
        f"-m pytest -m gpu -v --junitxml {{out}}/{name}-alone.xml {' '.join(single)}",
    )


def card(models: str, name: str, more: str = "") -> str:
    return f"-m quire.bench card --models {models} --output {{out}}/card-{name}.json {more}"


PARTS = {
    "tests": Part(
        "all pass; first of all, since most of these never ran on a GPU",
        tests("tests", " ".join(f"tests/gpu/test_{name}.py" for name in NEW_TESTS), ["sleep"]),
    ),
    "all-tests": Part("all pass", tests("all-tests", "tests/gpu", list(ALONE))),
    "latent": Part(
        "DeepSeek-V2-Lite 2.3 ms a token, nano greedy 12,000, t512_128 60,000, prefill 95,000, start 30 s, ctx6k "
        "within 1.3 of its bytes; V3 of six layers in fp8 blocks within 1.5 of its bytes at 1 and 64 rows",
        (
            card("deepseek-v2-lite", "v2-lite"),
            card("deepseek-v3-6-layers", "v3", "--workloads b1,nano_greedy --profile --profile-batches 1,64"),
            "-m benchmarks.gpu.latent --tune decode --json {out}/latent.json",
        ),
    ),
    "mixture": Part(
        "Qwen3-30B-A3B 2.35 ms, nano 6,700, t512_128 58,139, prefill 76,126",
        (
            card("qwen3-30b-a3b", "30b"),
            "-m benchmarks.gpu.moe --shape 66,8,2048,1408 --shared 2 --json {out}/moe.json",
        ),
    ),
    "together": Part(
        "adapters: one 4.3 ms a token, eight 90 % of nano, 88 % of prefill, first use 0.1 s, 99 % without any; 16 "
        "prompts of 8,000: 0.06 s from the device, 0.40 s from the tier; saving to it 98 %; sleep 3 s, wake 0.6 s; "
        "embeddings: 414,000 tok/s, 2.5 ms; DeepSeek-V2-Lite as in `latent`",
        ("-m benchmarks.gpu.together embeddings,adapters,deepseek-v2-lite --profile --out {out}/together",),
    ),
    "loading": Part("weights of a checkpoint 8 GB/s", ("-m benchmarks.loading --gigabytes 16",)),
    "starts": Part(
        "to the first token, kernels compiled: 0.5 s more with the CPU tier, 2 s more with --enable-lora",
        ("-m benchmarks.gpu.starts --json {out}/starts.json",),
    ),
    "card": Part(
        "0.6B: 0.60 ms, nano 27,500, prefill 460,000, start 13 / 5.5 s; 8B: nano 10,800, t512_128 39,000, prefill "
        "43,500; fp8: 2.5 ms, prefill 72,000",
        (card("qwen3-0.6b,llama3-8b,llama3-8b-fp8", "card"),),
    ),
    "invariant": Part(
        "80 % of the card's nano, 90 % of its b1",
        tuple(
            card(model, f"invariant-{model}", "--workloads b1,nano_greedy --batch-invariant")
            for model in ("qwen3-0.6b", "llama3-8b", "qwen3-30b-a3b")
        ),
    ),
}


def run(name: str, folder: Path, end: float, tar: Path) -> None:
    """`end`: on the monotonic clock."""
    commands = PARTS[name].commands
    for number, command in enumerate(commands):
        began, log = time.monotonic(), folder / f"{name}.log"
        words = [PYTHON, *command.format(out=folder).split()]
        seconds = end - began - LEFT_TO_NEXT * (len(commands) - number - 1)
        start = log.stat().st_size if log.exists() else 0
        status = ended(words, log, seconds) if seconds > 0 else "no time left"
        print(f"{name}: {status} after {time.monotonic() - began:.0f} s: {' '.join(words[1:])}", flush=True)
        if status != "0" and log.exists():
            print(log.read_bytes()[start:][-PRINTED_BYTES:].decode(errors="replace"), flush=True)
        pack(folder, tar)


def ended(words: list[str], log: Path, seconds: float) -> str:
    """The exit status of a command, with which all of its processes have ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return str(process.wait(seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pack(folder: Path, tar: Path) -> None:
    """In one file: few come back from a machine that is lent. Always a whole one, should it be taken away."""
    new = tar.with_name(f"{tar.name}.new")
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, folder.name)
    new.replace(tar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="what each part must show")
    parser.add_argument("--output", type=Path, default=Path("build/acceptance"))
    parser.add_argument("--tar", type=Path, help="default: the folder's name with .tar.gz")
    parser.add_argument("--seconds", type=float, default=550, help="for all parts together (default: %(default)s)")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:11}{part.goal}" for name, part in PARTS.items()))
        return
    end = time.monotonic() + args.seconds
    # A shell's job in the background ignores SIGINT, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for command in (["free", "-g"], ["nvidia-smi", "-L"]):  # a tier is refused where the host has too little
        if shutil.which(command[0]):
            sys.stdout.flush()
            subprocess.run(command)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        run(name, args.output, end, args.tar or args.output.with_name(f"{args.output.name}.tar.gz"))


if __name__ == "__main__":
    main()
