"""llama.cpp under the card's CPU workloads, with flash attention on and off, in process and over HTTP.

    python -m benchmarks.peers.llama_cpp --model FILE.gguf --server llama-server --quire .venv/bin/quire

Run by the Python of an environment with llama-cpp-python, from Quire's repository. In process it takes requests one
after the other, reusing what a prompt has in common with the one before; its server takes them together.
"""

import importlib.metadata
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.common import (
    Column,
    Seconds,
    in_fresh_process,
    measure,
    measure_all,
    measure_rows,
    over_http,
    parser,
    report,
    serving,
    warm_up_server,
)
from quire.bench.workloads import Workload

if TYPE_CHECKING:
    from llama_cpp import Llama

CONTEXT = 2048
IN_PROCESS = ("latency", "prefix", "prefill")
OVER_HTTP = ("latency", "throughput", "prefill")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    options.add_argument("--server", metavar="FILE", help="llama-server; without it only what runs in process")
    options.add_argument("--slots", type=int, default=64, help="requests that its server takes together (default: 64)")
    options.add_argument("--flash-attention", nargs="+", choices=("off", "on"), default=("off", "on"))
    args = options.parse_args()
    threads = len(os.sched_getaffinity(0))
    facts = {"model": args.model.name, "llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
    columns = []
    for flash in args.flash_attention:
        chosen = [name for name in IN_PROCESS if name in args.workloads]
        columns.append(in_fresh_process(offline, args.model, threads, flash == "on", chosen, args.repetitions))
        if args.server and args.quire:
            column = Column(f"HTTP, flash attention {flash}", {"slots": args.slots, "threads": threads})
            columns.append(column)
            with serving(column, server_command(args.server, args.model, threads, args.slots, flash)) as url:
                warm_up_server(args.quire, url)
                seconds = over_http(args.quire, url)
                for name in [name for name in OVER_HTTP if name in args.workloads]:
                    for repetition in range(args.repetitions):
                        column.add(measure(seconds, name, repetition))
                measure_rows(column, args.quire, url, args.rows, args.repetitions)
        report(columns, facts, args.output)


def offline(started: float, model: Path, threads: int, flash: bool, workloads: list[str], repetitions: int) -> Column:
    from llama_cpp import Llama

    options = {"n_ctx": CONTEXT, "n_batch": CONTEXT, "n_threads": threads, "n_threads_batch": threads}
    column = Column(f"in process, flash attention {'on' if flash else 'off'}", options)
    llama = Llama(str(model), flash_attn=flash, verbose=False, **options)
    measure_all(column, caller(llama), started, workloads, repetitions)
    return column


def caller(llama: "Llama") -> Seconds:
    def seconds(workload: Workload) -> float:
        llama.reset()  # else a prompt's repetition would be found where its first call left it
        start = time.perf_counter()
        for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
            tokens = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)  # goes on past the end of a text
            for _ in range(length):
                next(tokens)
        return time.perf_counter() - start

    return seconds


def server_command(server: str, model: Path, threads: int, slots: int, flash: str) -> list[str]:
    """Slots without a prompt cache: every repetition is to find it cold."""
    return [
        *(server, "--model", str(model), "--host", "127.0.0.1", "--flash-attn", flash),
        *("--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(slots)),
        *("--ctx-size", str(slots * CONTEXT), "--no-cache-prompt", "--cache-ram", "0", "--port"),
    ]


if __name__ == "__main__":
    main()
