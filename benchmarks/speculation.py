"""Speculation on a CPU against none: the same requests in alternating pairs, on the embedded model.

    python -m benchmarks.speculation --method ngram [--rounds 5] [--tasks edit,chat] [--out FILE.json]

Two engines, each in a process of its own, take turns; the idle one sleeps. A figure is output tokens per second, one
request at a time (chat64: 64 at once), prompts included; nothing is cached from one run to the next. Printed per task:
the ratio of the medians, the drafts that were accepted, and in how many prompts both texts are equal (all in float32;
in bf16 the rounding of a sum may depend on the number of rows). --quantization dequantized, the default, is bf16 or
float32 by the processor; "" is Q4_1.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.speculation_tasks import TASKS, Task
from quire.bench.machine import describe_machine


def serve(options: dict[str, Any]) -> None:
    """A child process: an engine that runs the tasks named on standard input, and prints a line for each."""
    from quire import LLM

    llm = LLM(max_model_len=2048, kv_cache_memory_bytes=1 << 30, **options)
    print("ready", flush=True)
    for repetition, line in enumerate(sys.stdin):
        print(json.dumps(run(llm, TASKS[line.strip()], salt=str(repetition))), flush=True)
    llm.shutdown()


def run(llm: Any, task: Task, salt: str) -> dict[str, Any]:
    """Of another salt nothing is known: neither prefixes nor, to suffix decoding, the same answers."""
    from quire import SamplingParams

    chats = [[{"role": "user", "content": prompt}] for prompt in task.prompts]
    render = llm.get_tokenizer().apply_chat_template
    prompts = [{"prompt_token_ids": render(chat, add_generation_prompt=True), "cache_salt": salt} for chat in chats]
    params = [
        SamplingParams(temperature=task.temperature, top_p=0.95, seed=i, max_tokens=task.max_tokens)
        for i in range(len(prompts))
    ]
    before = draft_counts(llm)
    began = time.perf_counter()
    groups = [slice(0, len(prompts))] if task.together else [slice(i, i + 1) for i in range(len(prompts))]
    outputs = [one for part in groups for one in llm.generate(prompts[part], params[part], use_tqdm=False)]
    seconds = time.perf_counter() - began
    drafted, accepted = (now - then for now, then in zip(draft_counts(llm), before, strict=True))
    texts = [one.outputs[0].text for one in outputs]
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    return {"rate": tokens / seconds, "tokens": tokens, "drafted": drafted, "accepted": accepted, "texts": texts}


def draft_counts(llm: Any) -> tuple[int, int]:
    """Drafts verified and accepted since the start."""
    stats = llm.llm_engine.stats.drafts
    return (0, 0) if stats is None else (stats.num_draft_tokens, stats.num_accepted_tokens)


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.speculation", "--serve", json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def run(self, task: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(task, file=self._process.stdin, flush=True)
        result: dict[str, Any] = json.loads(self._answer("{"))
        return result

    def close(self) -> None:
        self._process.communicate()

    def _answer(self, start: str) -> str:
        """The next line that begins so: others are logs."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"an engine exited with code {self._process.wait()}; its log is above")


def measure(tasks: list[str], rounds: int, plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    engines = {"plain": Engine(plain), "drafted": Engine(drafted)}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {task: {name: [] for name in engines} for task in tasks}
    try:
        for repetition in range(rounds + 1):
            for task in tasks:
                for name in list(engines)[:: 1 if repetition % 2 else -1]:
                    result = engines[name].run(task)
                    if repetition:  # the first is the warm-up
                        found[task][name].append(result)
    finally:
        for engine in engines.values():
            engine.close()
    return {task: compare(**runs) for task, runs in found.items()}


def compare(plain: list[dict[str, Any]], drafted: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {name: [run["rate"] for run in runs] for name, runs in (("plain", plain), ("drafted", drafted))}
    texts = zip(plain[0]["texts"], drafted[0]["texts"], strict=True)
    verified = sum(run["drafted"] for run in drafted)
    return {
        "ratio": statistics.median(rates["drafted"]) / statistics.median(rates["plain"]),
        "tokens_per_s": rates,
        "acceptance": sum(run["accepted"] for run in drafted) / verified if verified else None,
        "accepted_share": sum(run["accepted"] for run in drafted) / sum(run["tokens"] for run in drafted),
        "equal_texts": sum(one == other for one, other in texts),
        "prompts": len(plain[0]["texts"]),
        "tokens": drafted[0]["tokens"],
    }


def show(task: str, result: dict[str, Any]) -> str:
    medians = [statistics.median(result["tokens_per_s"][name]) for name in ("plain", "drafted")]
    acceptance = "none verified" if result["acceptance"] is None else f"{result['acceptance']:.0%} accepted"
    return (
        f"{task:10} {result['ratio']:5.2f} x ({medians[0]:.1f} to {medians[1]:.1f} tok/s), drafts {acceptance}, "
        f"{result['accepted_share']:.0%} of the tokens were drafts, {result['equal_texts']} of {result['prompts']} "
        "texts equal"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ngram", help="as speculative_config has it (default: ngram)")
    parser.add_argument("--spec", type=json.loads, default={}, help="other keys of speculative_config, as JSON")
    parser.add_argument("--no-adaptive", action="store_true", help="always verify all drafts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="dequantized")
    parser.add_argument("--cpu-threads", type=int, help="default: all cores")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    tasks = options.tasks.split(",")
    if unknown := set(tasks) - set(TASKS):
        parser.error(f"--tasks: {', '.join(sorted(unknown))}; allowed: {', '.join(TASKS)}")
    plain = {"dtype": options.dtype, "quantization": options.quantization or None, "cpu_threads": options.cpu_threads}
    drafted = plain | {"speculative_config": {"method": options.method, **options.spec}}
    if options.no_adaptive:
        drafted["spec_adaptive"] = False
    results = measure(tasks, options.rounds, plain, drafted)
    for task, result in results.items():
        print(show(task, result))
    if options.out:
        facts = {"benchmark": "speculation", "engine": drafted, "machine": describe_machine(probe=False)}
        options.out.write_text(json.dumps(facts | {"tasks": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
