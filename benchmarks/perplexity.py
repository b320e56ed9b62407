"""Perplexity of a text under several settings of one model, by prompt_logprobs.

    python -m benchmarks.perplexity --text FILE --models bf16=FOLDER int8=FOLDER,quantization=int8 q4_1=FILE.gguf
        [--skip CHARACTERS] [--windows 8] [--length 1024] [--output FILE.json]

A model is a name, a folder or file, and options of `LLM`. The text, from a character on, is cut into windows of tokens,
each a prompt of its own; of a window's first half nothing is counted: all tokens that count have as much before them.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=MODEL[,OPTION=VALUE]")
    parser.add_argument("--skip", type=int, default=0, help="characters of the text")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    text = args.text.read_text("utf-8")[args.skip :]
    results: dict[str, Any] = {}
    for word in args.models:
        name, _, chosen = word.partition("=")
        model, *options = chosen.split(",")
        found = losses(model, dict(o.split("=", 1) for o in options), text, args.windows, args.length)
        results[name] = {"perplexity": math.exp(sum(found) / len(found)), "tokens": len(found)}
        print(f"{name:<20} {results[name]['perplexity']:.3f} of {len(found):,} tokens", flush=True)
    if args.output:
        args.output.write_text(json.dumps(vars(args) | {"results": results}, indent=1, default=str) + "\n", "utf-8")


def losses(model: str, options: dict[str, Any], text: str, windows: int, length: int) -> list[float]:
    with LLM(model, max_model_len=length + 1, kv_cache_memory_bytes=1 << 30, **options) as llm:
        ids = llm.get_tokenizer().encode(text[: 8 * windows * length])[: windows * length]
        prompts = [{"prompt_token_ids": ids[at : at + length]} for at in range(0, len(ids), length)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, each in list(zip(prompt["prompt_token_ids"], output.prompt_logprobs, strict=True))[length // 2 :]:
            assert each is not None
            found.append(-each[token].logprob)
    return found


if __name__ == "__main__":
    main()
