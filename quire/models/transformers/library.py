"""The transformers library, imported lazily: whether it supports a model, and the model's config object."""

import json
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.checkpoint.resolve import Checkpoint
from quire.platforms.private_files import process_folder, require_private_tree

logger = logging.getLogger("quire")

INSTALL = "pip install 'transformers>=5.0'"


def is_installed() -> bool:
    return find_spec("transformers") is not None


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"this model is served through transformers, which cannot be imported ({error}); run: {INSTALL}"
        ) from error
    version = transformers.__version__
    if int(version.partition(".")[0]) < 5:
        raise ValueError(f"transformers is {version}, but this backend needs 5.0 or later; run: {INSTALL}")
    return transformers


def unsupported_reason(hf_config: dict[str, Any], trust_remote_code: bool) -> str | None:
    """Why transformers has no causal language model for this config; None: it has one. Runs no code of the model."""
    if not is_installed():
        return f"transformers, which may have it, is not installed ({INSTALL})"
    model_type = hf_config.get("model_type")
    has_remote_code = "AutoModelForCausalLM" in (hf_config.get("auto_map") or {})
    if has_remote_code and trust_remote_code:
        return None
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if has_remote_code:
        return "the checkpoint contains Python code for the model; --trust-remote-code runs it, if you trust its author"
    return f"transformers has no causal language model of model_type {model_type!r} either"


@dataclass(frozen=True)
class RemoteCode:
    """Whether the checkpoint's Python code may run, and its revision where that is in a repository of its own."""

    trusted: bool = False
    revision: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of transformers' from_pretrained and from_config."""
        revision = {"code_revision": self.revision} if self.trusted and self.revision is not None else {}
        return {"trust_remote_code": self.trusted, **revision}


def auto_config(checkpoint: Checkpoint, hf_config: dict[str, Any], code: RemoteCode) -> Any:
    """transformers' config object with the values of `hf_config`, which may differ from config.json (overrides)."""
    transformers = import_transformers()
    values = _with_floats(hf_config)
    if code.trusted and hf_config.get("auto_map"):
        _secure_code_cache()
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, **code.arguments)
        stored = _with_floats(json.loads((checkpoint.path / "config.json").read_bytes()))
        config.update({name: value for name, value in values.items() if value != stored.get(name)})
        return config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[hf_config["model_type"]].from_dict(values)
    except Exception as error:  # an untrusted config may raise anything
        raise ValueError(f"transformers cannot read the model's config: {error}") from error


def _secure_code_cache() -> None:
    """transformers imports remote code from copies in a cache folder, which other users must not be able to write."""
    from transformers import dynamic_module_utils

    try:
        require_private_tree(Path(dynamic_module_utils.HF_MODULES_CACHE))
    except OSError as error:
        dynamic_module_utils.HF_MODULES_CACHE = str(process_folder())
        logger.warning("transformers' cache of remote code is not used: %s", error)


def _with_floats(config: dict[str, Any]) -> dict[str, Any]:
    """transformers writes infinity, which JSON does not have, as {"__float__": "Infinity"}."""

    def decoded(part: dict[str, Any]) -> Any:
        return float(part["__float__"]) if "__float__" in part else part

    return json.loads(json.dumps(config), object_hook=decoded)
