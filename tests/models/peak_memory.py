"""Load SmolLM2 in bfloat16 and print the peak growth of anonymous memory and the size of the weights, in bytes."""

import sys
import threading
from pathlib import Path

import torch

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.models.loading.loader import load_model
from quire.models.registry import model_class


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def main(state: str) -> None:
    ckpt = resolve_model(None)
    hf = load_hf_config(ckpt)
    model_class(hf)  # import what is needed before measuring
    if state == "used":
        torch.ones(3000, 3000).bfloat16()
    numbers = sum(torch.Size(tensor.shape).numel() for tensor in open_tensors(ckpt))

    before = peak = anonymous_memory()
    loaded = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not loaded.wait(0.002):
            peak = max(peak, anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(ckpt, hf, torch.bfloat16, "cpu", quantization="dequantized")
    loaded.set()
    watcher.join()
    peak = max(peak, anonymous_memory())
    assert not model.training
    print(peak - before, numbers * 2)


main(sys.argv[1])
