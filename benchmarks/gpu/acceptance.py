"""All that is to be shown on an H200, in parts of less than ten minutes each.

    python -m benchmarks.gpu.acceptance --list
    python -m benchmarks.gpu.acceptance tests latent --output FOLDER [--seconds 580]

Commands of a part run one after the other; what they print goes to FOLDER/PART.log, their results to files beside it. A
command that fails does not keep the next ones from running; one that runs out of time is ended.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from quire.bench.internal.card.models import write_shape

PYTHON = sys.executable
SHAPES = Path(tempfile.gettempdir(), "quire-shapes")
NEW_TESTS = [
    *("latent", "latent_kernels", "moe", "fp8_experts", "adapters", "encoders", "pooling"),
    *("kv_tier", "sleep", "connector", "batch_invariant"),
]


@dataclass(frozen=True)
class Part:
    goal: str
    commands: tuple[str, ...]  # {out} is the folder, {shapes} one with configs of the card


def tests(names: list[str]) -> str:
    files = " ".join(f"tests/gpu/test_{name}.py" for name in names)
    return f"-m pytest -m gpu -q -n 8 --junitxml {{out}}/tests.xml {files}"


def card(models: str, name: str, more: str = "") -> str:
    return f"-m quire.bench card --models {models} --output {{out}}/card-{name}.json {more}"


TIERED = "--model {shapes}/llama3-8b --load-format dummy --device-gib 24 --tier-gib 32"
PARTS = {
    "tests": Part("all pass; first of all, since most of these never ran on a GPU", (tests(NEW_TESTS),)),
    "all-tests": Part("all pass", ("-m pytest -m gpu -q -n 8 --junitxml {out}/all-tests.xml tests/gpu",)),
    "latent": Part(
        "DeepSeek-V2-Lite 2.3 ms a token, nano greedy 12,000, t512_128 60,000, prefill 95,000, start 30 s, ctx6k "
        "within 1.3 of its bytes; V3 of six layers in fp8 blocks within 1.5 of its bytes at 1 and 64 rows",
        (
            "-m benchmarks.gpu.latent --tune decode --json {out}/latent.json",
            card("deepseek-v2-lite", "v2-lite"),
            card("deepseek-v3-6-layers", "v3", "--workloads b1,nano_greedy --profile --profile-batches 1,64"),
        ),
    ),
    "mixture": Part(
        "Qwen3-30B-A3B 2.35 ms, nano 6,700, t512_128 58,139, prefill 76,126",
        (
            "-m benchmarks.gpu.moe --shape 66,8,2048,1408 --shared 2 --json {out}/moe.json",
            card("qwen3-30b-a3b", "30b"),
        ),
    ),
    "adapters": Part(
        "one adapter 4.3 ms a token; eight 90 % of nano, 88 % of prefill; first use 0.1 s; enabled without any 99 %, "
        "start + 2 s",
        ("-m benchmarks.gpu.adapters --out {out}/adapters.json",),
    ),
    "tiers": Part(
        "16 prompts of 8,000: 0.06 s from the device, 0.40 s from the tier; churn 98 %; sleep 3 s, wake 0.6 s; 8 GB/s",
        (
            f"-m benchmarks.kv_tiers prompts {TIERED} --users 16 --tokens 8000 --output 1 --rounds 1 "
            "--out {out}/tier-prompts.json",
            f"-m benchmarks.kv_tiers churn {TIERED} --users 256 --tokens 1024 --output 512 --rounds 2 "
            "--out {out}/tier-churn.json",
            "-m benchmarks.sleep --out {out}/sleep.json",
            "-m benchmarks.loading --gigabytes 16",
        ),
    ),
    "embeddings": Part("414,000 tok/s; 2.5 ms", ("-m benchmarks.gpu.embeddings --out {out}/embeddings.json",)),
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


def run(name: str, folder: Path, seconds: float) -> list[str]:
    """A line for each command."""
    lines, end = [], time.monotonic() + seconds
    with (folder / f"{name}.log").open("ab") as log:
        for command in PARTS[name].commands:
            began = time.monotonic()
            words = [PYTHON, *command.format(out=folder, shapes=SHAPES).split()]
            try:
                left = max(1.0, end - began)
                code = str(subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, timeout=left).returncode)
            except subprocess.TimeoutExpired:
                code = "out of time"
            lines.append(f"{name}: {code} after {time.monotonic() - began:.0f} s: {' '.join(words[1:])}")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="what each part must show")
    parser.add_argument("--output", type=Path, default=Path("build/acceptance"))
    parser.add_argument("--seconds", type=float, default=580, help="for all parts together (default: %(default)s)")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:11}{part.goal}" for name, part in PARTS.items()))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    SHAPES.mkdir(exist_ok=True)
    write_shape("llama3-8b", SHAPES)
    end = time.monotonic() + args.seconds
    for name in args.parts:
        run(name, args.output, end - time.monotonic())


if __name__ == "__main__":
    main()
