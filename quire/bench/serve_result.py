"""The result files of `quire bench serve --save-result`, with the keys of vLLM's, so that scripts read both."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.serve_client import Record, Run
from quire.bench.serve_stats import Stats


def vllm_result(args: argparse.Namespace, model: str, date: str, run: Run, stats: Stats) -> dict[str, Any]:
    setup = {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": getattr(args, "tokenizer", None) or model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata),
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        setup |= {name: getattr(args, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    result = setup | _totals(run, stats) | _latencies(stats, args.percentile_metrics, args.metric_percentiles)
    return result | (_details(run.records) if args.save_detailed else {})


def _totals(run: Run, stats: Stats) -> dict[str, Any]:
    seconds = stats.duration
    return {
        "duration": seconds,
        "completed": len(stats.completed),
        "failed": sum(stats.errors.values()),
        "total_input_tokens": stats.prompt_tokens,
        "total_output_tokens": stats.output_tokens,
        "request_throughput": len(stats.completed) / seconds,
        "request_goodput": None if stats.good is None else stats.good / seconds,
        "output_throughput": stats.output_tokens / seconds,
        "total_token_throughput": (stats.prompt_tokens + stats.output_tokens) / seconds,
        "max_output_tokens_per_s": _peak_rate(run, stats),
        "max_concurrent_requests": stats.peak_concurrency,
    }


def _peak_rate(run: Run, stats: Stats) -> float:
    """The most tokens within one second after the start; a request's tokens are spread evenly over its events."""
    counts = np.zeros(int(stats.duration) + 1)
    for record in stats.completed:
        if record.events:
            bins = (np.array(record.events) - run.start).astype(int).clip(0, len(counts) - 1)
            counts += np.bincount(bins, minlength=len(counts)) * (record.output_tokens / len(record.events))
    return float(counts.max())


def _latencies(stats: Stats, shown: list[str], percentiles: list[float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in shown:
        values = stats.latencies[name] if len(stats.latencies[name]) else np.zeros(1)
        found |= {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(np.median(values))}
        found[f"std_{name}_ms"] = float(values.std())
        found |= {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}
    return found


def _details(records: list[Record]) -> dict[str, Any]:
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.events[0] - record.sent if record.events else 0.0 for record in records],
        "itls": [np.diff(record.events).tolist() for record in records],
        "start_times": [record.sent for record in records],
        "generated_texts": ["".join(record.texts.get(0, ())) for record in records],
        "errors": [record.error or "" for record in records],
    }


def result_file(args: argparse.Namespace, model: str, date: str) -> Path:
    if args.result_filename:
        return Path(args.result_dir or ".") / args.result_filename
    if args.ramp_up_strategy is not None:
        load = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    else:
        load = f"{args.request_rate}qps"
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    name = f"{args.label or args.backend}-{load}{limit}-{model.rstrip('/').split('/')[-1]}-{date}.json"
    return Path(args.result_dir or ".") / name


def save_results(file: Path, results: list[dict[str, Any]], append: bool) -> None:
    """One object per repetition, each on its own line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(result) for result in results)
    with file.open("a" if append else "w", encoding="utf-8") as out:
        out.write("\n" + text if out.tell() else text)
