"""How fast weights get from the page cache to the device: python -m benchmarks.loading --gigabytes 16

Writes a checkpoint of a Llama shape to --folder (kept between runs), reads it once so that it is cached, then loads it
some times, by `load_model`, packing of weights included.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.models.loading.loader import load_model

HIDDEN, WIDTH, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128256
LAYER_BYTES = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS + 3 * HIDDEN * WIDTH + 2 * HIDDEN)
ENDS_BYTES = 2 * (2 * VOCABULARY * HIDDEN + HIDDEN)
LAYERS_IN_FILE = 10


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def weight(*shape: int) -> torch.Tensor:
    """Random numbers, the same in every row: they take long to make."""
    return torch.randn(shape[-1]).bfloat16().expand(shape).contiguous()


def layer(i: int) -> dict[str, torch.Tensor]:
    name, kv = f"model.layers.{i}", HIDDEN * KV_HEADS // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"{name}.{part}.weight": weight(*shape) for part, shape in shapes.items()}


def write(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True)
    ends = {f"{name}.weight": weight(VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    save_file(ends | {"model.norm.weight": weight(HIDDEN)}, folder / "model-ends.safetensors")
    for first in range(0, layers, LAYERS_IN_FILE):
        tensors: dict[str, torch.Tensor] = {}
        for i in range(first, min(first + LAYERS_IN_FILE, layers)):
            tensors |= layer(i)
        save_file(tensors, folder / f"model-{first:03}.safetensors")
    (folder / "config.json").write_text(json.dumps(config(layers)))  # last: a folder with it is complete


def seconds_to_load(checkpoint: Checkpoint, device: torch.device, threads: int | None) -> float:
    hf_config = load_hf_config(checkpoint)
    start = time.perf_counter()
    model = load_model(checkpoint, hf_config, torch.bfloat16, device, threads=threads)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del model
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=16.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quire-loading"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, nargs="*", default=[None], help="numbers to compare")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    layers = max(1, round((args.gigabytes * 1e9 - ENDS_BYTES) / LAYER_BYTES))
    folder = args.folder / f"llama-{layers}-layers"
    if not (folder / "config.json").exists():
        write(folder, layers)
    checkpoint = resolve_model(str(folder))
    gigabytes = sum(file.stat().st_size for file in checkpoint.files) / 1e9
    read_ahead(checkpoint.files, wait=True)
    found: dict[int | None, list[float]] = {threads: [] for threads in args.threads}
    for _ in range(args.rounds):
        for threads, seconds in found.items():
            seconds.append(seconds_to_load(checkpoint, torch.device(args.device), threads))
    for threads, seconds in found.items():
        rates = [gigabytes / one for one in seconds]
        print(
            json.dumps(
                {
                    "device": args.device,
                    "threads": threads or "default",
                    "gigabytes": round(gigabytes, 2),
                    "GB/s": round(statistics.median(rates), 2),
                    "all": [round(rate, 2) for rate in rates],
                }
            )
        )


if __name__ == "__main__":
    main()
