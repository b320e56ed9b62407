"""From what the user asked to a configuration with nothing left open."""

import dataclasses

from quire.checkpoint.config import load_eos_token_ids, load_hf_config
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.config import EngineConfig


def resolve_config(config: EngineConfig) -> tuple[EngineConfig, Checkpoint]:
    """Find the model, read its configuration, and fill in what depends on model and platform."""
    from quire.platforms import current_platform

    asked = config.model
    checkpoint = resolve_model(
        asked.model,
        load_format=config.load.load_format,
        revision=asked.revision,
        download_dir=config.load.download_dir,
    )
    hf_config = load_hf_config(checkpoint)
    longest = hf_config.get("max_position_embeddings")
    if asked.max_model_len is not None and longest is not None and asked.max_model_len > longest:
        raise ValueError(
            f"max_model_len is {asked.max_model_len}, but {checkpoint.name} has positions for {longest} tokens; "
            f"use at most that (--max-model-len)"
        )
    platform = current_platform(config.device.device)
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
    dtype = asked.dtype if asked.dtype != "auto" else str(platform.default_dtype(stored)).removeprefix("torch.")
    model = dataclasses.replace(
        asked,
        dtype=dtype,
        hf_config=hf_config,
        eos_token_ids=load_eos_token_ids(checkpoint, hf_config),
        vocab_size=int(hf_config["vocab_size"]),
    )
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_seqs=config.scheduler.max_num_seqs or platform.default_max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or platform.default_max_num_batched_tokens,
    )
    device = dataclasses.replace(config.device, device=platform.name)
    return config.replace(model=model, scheduler=scheduler, device=device), checkpoint
