"""Keys of vLLM's speculative_config beside those that work: accepted with the reason, or refused with the feature."""

from collections.abc import Mapping
from typing import Any

from quire.config.logs import say_once

ACCEPTED: dict[str, tuple[str, ...]] = {
    "it is shared as the model is": (
        "draft_tensor_parallel_size",
        "tensor_parallel_size",
        "use_local_argmax_reduction",
    ),
    "a proposer is captured or replayed wherever the model is": ("enforce_eager", "disable_padded_drafter_batch"),
    "the length of drafts follows acceptance and the cost of steps": (
        "num_speculative_tokens_per_batch_size",
        "disable_by_batch_size",
        "speculative_disable_by_batch_size",
    ),
    "it is the one of the model": ("moe_backend", "attention_backend", "kv_cache_dtype", "draft_load_config"),
    "logprobs are those of the model": ("disable_logprobs", "disable_log_stats"),
    "the last block of a prefix is computed again wherever hidden states need it": ("disable_eagle_block_drop",),
    "vLLM sets it itself": (
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "num_lookahead_slots",
    ),
}
# With the values that ask for nothing, beside None and False.
NOT_YET: dict[str, tuple[str, tuple[Any, ...]]] = {
    "rejection_sample_method": ("further ways to accept drafts", ("standard", "rejection_sampler")),
    "acceptance_method": ("further ways to accept drafts", ("rejection_sampler",)),
    "synthetic_acceptance_rates": ("further ways to accept drafts", ()),
    "synthetic_acceptance_rate": ("further ways to accept drafts", ()),
    "synthetic_acceptance_length": ("further ways to accept drafts", ()),
    "speculative_token_tree": ("trees of drafts", ()),
    "parallel_drafting": ("drafts made in parallel", ()),
    "use_heterogeneous_vocab": ("a draft model of another vocabulary", ()),
    "index_share_for_mtp_iteration": ("sparse attention", ()),
    "code_revision": ("code of a draft model's checkpoint", ()),
    "enable_adaptive_verification": ("the method dspark", ()),
    "dspark_draft_topk": ("the method dspark", ()),
}
METHODS_NOT_YET = ("mlp_speculator", "dflash", "dspark", "extract_hidden_states", "custom_class")
_REASONS = {key: reason for reason, keys in ACCEPTED.items() for key in keys}


def settle_keys(given: Mapping[str, Any], works: tuple[str, ...]) -> dict[str, Any]:
    """Those of `works` that have a value. Of the others a ValueError says which are not available yet or unknown."""
    for key, value in given.items():
        if key in works:
            continue
        if key in _REASONS:
            if value is not None:
                say_once(f"--speculative-config: {key} is accepted: {_REASONS[key]}")
        elif key not in NOT_YET:
            raise ValueError(f"speculative_config has {key!r}; allowed: {', '.join(works)} (--speculative-config)")
        elif value not in (None, False, *NOT_YET[key][1]):
            raise ValueError(
                f"not available yet: {NOT_YET[key][0]}; speculative_config: {key} is {value!r}, leave it out"
            )
    return {key: given[key] for key in works if given.get(key) is not None}
