"""vLLM's `bench serve`: python vllm_bench.py URL."""

import json
import sys
import tempfile
from pathlib import Path

from local_tokenizer import tokenizer_folder
from steps import run_steps
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

URL = sys.argv[1]
REQUESTS, INPUT, OUTPUT = 6, 32, 16


def bench(backend: str, endpoint: str, *flags: str) -> None:
    """The command `vllm bench serve` without `vllm`, which in the CPU build does not find its own version."""
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--backend", backend, "--endpoint", endpoint, "--base-url", URL, "--num-prompts", str(REQUESTS)]
        words += ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
        words += ["--tokenizer", tokenizer_folder(Path("tokenizer")), "--save-result", "--result-dir", folder]
        serve.main(parser.parse_args([*words, "--result-filename", "result.json", *flags]))
        result = json.loads((Path(folder) / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0), result
    assert result["total_output_tokens"] == REQUESTS * OUTPUT and result["total_input_tokens"] >= REQUESTS * INPUT
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0


def completions() -> None:
    """bench serve --backend openai and vllm on /v1/completions"""
    bench("openai", "/v1/completions")
    bench("vllm", "/v1/completions", "--request-rate", "4", "--ignore-eos")


def chat() -> None:
    """bench serve --backend openai-chat on /v1/chat/completions"""
    bench("openai-chat", "/v1/chat/completions", "--max-concurrency", "2", "--temperature", "0")


run_steps((completions, chat))
