"""Prints facts about torch and its devices as JSON; run as a subprocess, since a broken driver can crash it."""

import json
from typing import Any


def gather() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "built for CUDA": torch.version.cuda,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "CUDA available": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        facts["cuDNN"] = torch.backends.cudnn.version()
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            memory = f"{device.total_memory / 2**30:.1f} GiB"
            facts[f"device {index}"] = f"{device.name}, {memory}, compute capability {device.major}.{device.minor}"
    return facts


if __name__ == "__main__":
    print(json.dumps(gather()))
