"""Resolves the user's configuration: finds the model and reads its config."""

import dataclasses
import functools
import logging
from typing import Any

from quire.checkpoint.config import check_kinds, load_eos_token_ids, load_hf_config, text_part
from quire.checkpoint.draft_config import resolve_drafts
from quire.checkpoint.generation_defaults import default_sampling
from quire.checkpoint.overrides import apply_overrides
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.config import EngineConfig, ModelConfig
from quire.config.environment import HF_TOKEN
from quire.config.shown import shown
from quire.config.values import INT32_MAX, finite_number, whole_number
from quire.models.registry import ModelRegistry
from quire.pooling.resolve import resolve_pooling
from quire.sample.user_processors import processor_classes

logger = logging.getLogger("quire")

# Names of the maximum sequence length in model configs.
LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
DEFAULT_LENGTH = 2048
# Whose positions are counted from behind the padding token's number.
COUNTED_FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")
MAX_FACTOR = 1e6


def resolve_config(config: EngineConfig) -> tuple[EngineConfig, Checkpoint]:
    """Find the model and read its configuration. Needs no torch: device-dependent values are filled in later, in the
    engine process (`platforms/defaults.py`)."""
    model_config = config.model
    processor_classes(model_config.logits_processors)  # fails before the model is loaded
    if isinstance(model_config.hf_token, str):
        HF_TOKEN.set(model_config.hf_token)  # the hub's library reads it, in child processes too
    checkpoint = resolve_model(
        model_config.model,
        load_format=config.load.load_format,
        revision=model_config.revision,
        download_dir=config.load.download_dir,
        remote_code=model_config.trust_remote_code,
        ignore_patterns=config.load.ignore_patterns,
    )
    if model_config.hf_config:
        return config, checkpoint  # already resolved by the parent process
    hf_config, overrides = apply_overrides(
        load_hf_config(checkpoint, model_config.hf_config_path), model_config.hf_overrides
    )
    check_kinds(hf_config, "the model's config")  # again, after --hf-overrides
    tokens = functools.partial(_token_id, checkpoint, model_config)
    supported = ModelRegistry.get_supported_archs()
    setup, hf_config, most = resolve_pooling(checkpoint.path, hf_config, config.pooling, supported, tokens)
    longest = longest_sequence(hf_config)
    window = sliding_window(hf_config) if model_config.disable_sliding_window else None
    max_model_len = model_config.max_model_len or window or (most if (most or longest) < longest else None)
    if window is not None and max_model_len is not None and max_model_len > window:
        raise ValueError(
            f"max_model_len is {max_model_len}, but without its sliding window {checkpoint.name} serves {window} "
            "tokens; use at most that, or leave the window (--max-model-len, --disable-sliding-window)"
        )
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}, but {checkpoint.name} has positions for {longest} tokens; "
            f"use at most that (--max-model-len)"
        )
    defaults, source = default_sampling(checkpoint, model_config)
    if defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("sampling defaults: %s (from %s)", values, source)
    model = dataclasses.replace(
        model_config,
        max_model_len=max_model_len,
        hf_token=None,  # a secret, which is not passed on
        revision=checkpoint.revision,  # a commit: the engine process must not resolve a branch that has moved
        hf_overrides=overrides,
        hf_config=hf_config,
        eos_token_ids=load_eos_token_ids(checkpoint, hf_config),
        vocab_size=vocab_size(hf_config),
        derived_max_model_len=longest,
        default_sampling=defaults,
    )
    drafts = resolve_drafts(config.speculative, config.load, hf_config, model.vocab_size, model.trust_remote_code)
    pooling = dataclasses.replace(config.pooling, setup=setup)
    return config.replace(model=model, speculative=drafts, pooling=pooling), checkpoint


def _token_id(checkpoint: Checkpoint, model: ModelConfig, text: str) -> int | None:
    from quire.tokenizer.load import tokenizer_of

    return tokenizer_of(checkpoint, model).backend.token_to_id(text)


def vocab_size(hf_config: dict[str, Any]) -> int:
    size = text_part(hf_config).get("vocab_size")
    if type(size) is not int or not 1 <= size <= INT32_MAX:
        raise ValueError(
            f"the model's config has vocab_size {shown(size)}; it must be a whole number (--hf-overrides sets it)"
        )
    return size


def longest_sequence(hf_config: dict[str, Any]) -> int:
    """max_position_embeddings, multiplied by the rope scaling's factor where that extends the context."""
    config = text_part(hf_config)
    name = next((name for name in LENGTH_NAMES if config.get(name)), None)
    positions = DEFAULT_LENGTH if name is None else whole_number(name, config[name])
    if config.get("model_type") in COUNTED_FROM_PADDING:
        padding = config.get("pad_token_id")
        return max(1, positions - 1 - whole_number("pad_token_id", 1 if padding is None else padding, minimum=0))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = finite_number("factor of the rope parameters", rope.get("factor") or 1.0, above=0.0, maximum=MAX_FACTOR)
    if kind in ("linear", "dynamic") and not str(config.get("model_type")).startswith("gemma3"):
        return whole_number(
            "the longest sequence, by the rope parameters,", int(positions * factor)
        )  # Gemma 3's max_position_embeddings is already scaled
    if kind == "yarn":
        original = "original_max_position_embeddings"
        stretched = int(whole_number(original, rope.get(original) or positions) * factor)
        return max(positions, whole_number("the longest sequence, by the rope parameters,", stretched, minimum=0))
    return positions


def sliding_window(hf_config: dict[str, Any]) -> int | None:
    config = text_part(hf_config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return None if window is None else min(longest_sequence(hf_config), whole_number("sliding_window", window))
