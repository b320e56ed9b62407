"""Loads a transformers model with its weights, or builds it with random ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from quire.checkpoint.resolve import Checkpoint
from quire.models.loading.weight_loader import abbreviated
from quire.models.transformers.attention import NO_INTERFACE, Unsupported
from quire.models.transformers.library import RemoteCode, import_transformers


def check_attention(config: Any) -> None:
    """Before weights are loaded: not all older models of transformers let attention be replaced."""
    known = import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        return  # remote code
    replaceable = getattr(known[type(config)], "_can_set_attn_implementation", None)
    if replaceable is not None and not replaceable():
        raise Unsupported(NO_INTERFACE)


@contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    """Restrict transformers' progress bars to terminals."""
    from transformers.utils import logging

    if (wanted and sys.stderr.isatty()) or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def load_pretrained(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    code: RemoteCode,
) -> Any:
    """By transformers, which knows the tensors that were renamed or fused since the checkpoint was written."""
    transformers = import_transformers()
    placed = device.type == "cpu" or find_spec("accelerate") is not None
    place = {"device_map": {"": str(device)}} if device.type != "cpu" and placed else {}
    elsewhere = any("--" in str(name) for name in (getattr(config, "auto_map", None) or {}).values())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        config=config,
        dtype=dtype,
        attn_implementation=implementation,
        local_files_only=not elsewhere,
        use_safetensors=checkpoint.format == "safetensors",
        output_loading_info=True,
        **code.arguments,
        **place,
    )
    found = (("lacks", info["missing_keys"]), ("has unknown", info["unexpected_keys"]))
    complaints = [f"{what} {abbreviated(sorted(names))}" for what, names in found if names]
    if complaints:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: it {' and '.join(complaints)}")
    return model if placed else model.to(device)


def init_with_random_weights(
    config: Any, dtype: torch.dtype, device: torch.device, implementation: str, code: RemoteCode, seed: int
) -> Any:
    """Generated on the device, where billions of random numbers take no time."""
    transformers = import_transformers()
    from transformers.initialization import no_init_weights

    with torch.device(device), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=implementation, **code.arguments
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
