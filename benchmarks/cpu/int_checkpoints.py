"""Decode speed of quantized checkpoints on a CPU per byte of weights read, in alternating runs.

    python -m benchmarks.cpu.int_checkpoints [--rounds 3] [--output FILE.json]

The embedded model, written as GPTQ (4 bits), W8A16 and W8A8, beside its own Q4_1, bf16 and --quantization int8. Each
run is a process of its own with one request of many tokens; a figure is the median of the rounds. Bytes are those of
the packed weights that a step reads, the head among them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from tests.quantization.int_checkpoints import Format, gptq, is_linear, w4a16, w8a8

TOKENS = 256
FORMATS = {"gptq-4": gptq(group_size=64), "W8A16": w4a16(bits=8, group_size=64), "W8A8": w8a8()}
PEERS = {"gptq-4": "Q4_1", "W8A16": "int8", "W8A8": "int8"}


def write(folder: Path, form: Format) -> None:
    """The embedded model in that format; the tied head stays bfloat16, as the formats' tools leave it."""
    checkpoint = resolve_model(None)
    stored: dict[str, torch.Tensor] = {}
    for tensor in open_tensors(checkpoint):
        weight = torch.empty(tensor.shape)
        tensor.read_into(weight)
        name = tensor.name.removesuffix(".weight")
        if is_linear(tensor.name):
            tensors, _ = form.write(name, weight)
            stored |= {f"{name}.{key}": value.contiguous() for key, value in tensors.items()}
        else:
            stored[tensor.name] = weight.bfloat16()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = load_hf_config(checkpoint) | {"quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def run_one(model: str | None, quantization: str | None) -> dict[str, float]:
    """In a process of its own: seconds per token, and bytes that a token reads."""
    from quire import LLM, SamplingParams
    from quire.quantization.block_quantized import block_quantized_weights

    llm = LLM(model, quantization=quantization, skip_tokenizer_init=True, max_model_len=512, dtype="bfloat16")
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(range(100, 132))}
    llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False), use_tqdm=False)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        seconds.append((time.perf_counter() - began) / TOKENS)
    network = llm.llm_engine.client.core.executor.worker.runner.model  # type: ignore[attr-defined]
    weights = block_quantized_weights(network)
    packed = {id(part): part.nbytes for w in weights for part in w.parts if part is not None}
    if not weights:
        packed[0] = network.num_parameters * 2
    elif not any(w is getattr(network.lm_head, "block_weight", None) for w in weights):
        packed[0] = network.embed_tokens.weight.numel() * 2  # the head, in bfloat16
    llm.shutdown()
    return {"seconds": min(seconds), "bytes": float(sum(packed.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "QUANTIZATION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, quantization = (None if value == "-" else value for value in options.one)
        print(json.dumps(run_one(model, quantization)))
        return
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        unquantized = str(Path(folder) / "bf16")
        cases = {"bf16": (unquantized, "-"), "Q4_1": ("-", "-"), "int8": (unquantized, "int8")}
        write(Path(folder) / "bf16", Format({}, lambda name, weight: ({"weight": weight.bfloat16()}, weight)))
        (Path(folder) / "bf16" / "config.json").write_text(
            json.dumps(load_hf_config(resolve_model(None)) | {"quantization_config": None}, default=str)
        )
        for name, form in FORMATS.items():
            write(Path(folder) / name, form)
            cases[name] = (str(Path(folder) / name), "-")
        for _ in range(options.rounds):
            for name, case in cases.items():
                command = [sys.executable, "-m", "benchmarks.cpu.int_checkpoints", "--one", *case]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                runs.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
    rates = {}
    for name, found in runs.items():
        each = sorted(run["bytes"] / run["seconds"] / 1e9 for run in found)
        rates[name] = statistics.median(each)
        tokens = statistics.median(1 / run["seconds"] for run in found)
        beside = f", {rates[name] / rates[PEERS[name]]:.2f} of {PEERS[name]}" if name in PEERS else ""
        size, spread = found[0]["bytes"] / 1e6, f"{each[0]:.2f} to {each[-1]:.2f}"
        print(f"{name:8} {tokens:6.1f} tok/s, {size:5.0f} MB, {rates[name]:.2f} GB/s ({spread}){beside}")
    if options.output:
        options.output.write_text(json.dumps({"runs": runs, "gb_per_s": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
