"""Reads the config of a draft model or head: which method it is for, and how many drafts it was made for."""

from typing import Any

from quire.checkpoint.config import load_hf_config, text_part
from quire.checkpoint.resolve import resolve_model
from quire.config import LoadConfig
from quire.config.shown import shown
from quire.config.speculative import DEFAULT_DRAFTS, MAX_DRAFTS, SpeculativeConfig

# Names of the number of drafts that a head was made for.
COUNT_NAMES = ("num_lookahead_tokens", "medusa_num_heads", "num_heads", "num_nextn_predict_layers", "n_predict")


def resolve_drafts(
    config: SpeculativeConfig, load: LoadConfig, target: dict[str, Any], vocab_size: int, trust_remote_code: bool
) -> SpeculativeConfig:
    """With method, number of drafts and `hf_config` of the draft model. `target` is the model's own config."""
    if config.hf_config or (config.model is None and config.method != "mtp"):
        return config
    hf_config = target
    if config.model is not None:
        checkpoint = resolve_model(
            config.model,
            load_format="dummy",  # no weights yet: whatever files they are in
            revision=config.revision,
            download_dir=load.download_dir,
            remote_code=trust_remote_code,
            ignore_patterns=load.ignore_patterns,
        )
        hf_config = load_hf_config(checkpoint)
    method = config.method or detect_method(hf_config, config.model or "")
    if method == "draft_model":  # heads are compared with the model that they belong to
        _check_vocabulary(config.model, hf_config, vocab_size)
    count = config.num_drafts if config.num_is_given else stated_drafts(hf_config, method)
    return config.resolved(method, count, hf_config)


def detect_method(hf_config: dict[str, Any], name: str) -> str:
    """By the head's own words; like vLLM by the model's name where published heads have none."""
    speculators = hf_config.get("speculators_config")
    if isinstance(speculators, dict):
        method = speculators.get("algorithm") or hf_config.get("speculators_model_type")
        if not isinstance(method, str) or method not in DEFAULT_DRAFTS:
            raise ValueError(
                f"{name}: speculators_config has the algorithm {shown(method)}; allowed: {', '.join(DEFAULT_DRAFTS)}"
            )
        return str(method)
    words = " ".join(map(str, (*(hf_config.get("architectures") or ()), hf_config.get("model_type")))).lower()
    if "medusa" in words or "medusa_num_heads" in hf_config:
        return "medusa"
    if "eagle3" in words or "draft_vocab_size" in hf_config or "eagle3" in name.lower():
        return "eagle3"
    if "eagle" in words or "eagle-" in name.lower():
        return "eagle"
    return "mtp" if "mtp" in words else "draft_model"


def stated_drafts(hf_config: dict[str, Any], method: str) -> int:
    """How many drafts the head's config says, or a default."""
    speculators = hf_config.get("speculators_config")
    proposals = speculators.get("proposal_methods") if isinstance(speculators, dict) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    stated = [first.get("speculative_tokens")] if isinstance(first, dict) else []
    if method in ("medusa", "mtp"):
        stated += [hf_config.get(name) for name in COUNT_NAMES]
    found = next((count for count in stated if type(count) is int and 1 <= count <= MAX_DRAFTS), None)
    return found if found is not None else DEFAULT_DRAFTS[method]


def _check_vocabulary(name: str | None, hf_config: dict[str, Any], wanted: int) -> None:
    """Drafts are ids of the model's own vocabulary."""
    size = text_part(hf_config).get("vocab_size")
    if size != wanted:
        raise ValueError(
            f"the draft model {name} has a vocabulary of {shown(size)} tokens, the model that it drafts for one of "
            f"{wanted}; they must be equal (--spec-model)"
        )
