"""What a device can compute in."""

import torch

MIN_CAPABILITY = (8, 9)  # of fp8 arithmetic


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
