"""`hf_overrides`: the user's changes to the model's config."""

import copy
from typing import Any

from quire.config.model import Overrides

ROPE_TYPE = ("rope_type", "type")  # current and legacy name


def apply_overrides(
    hf_config: dict[str, Any], overrides: Overrides | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The changed config, and the changes as a dict, which unlike a function can be sent to another process.

    Nested dicts are merged, so that one key of `rope_parameters` or `text_config` can be changed alone.
    """
    if not callable(overrides):
        changes = None if overrides is None else _normalize_rope(hf_config, overrides)
        return merged(hf_config, changes or {}), changes
    changed = overrides(copy.deepcopy(hf_config))
    if not isinstance(changed, dict):
        raise ValueError(
            f"hf_overrides returned a {type(changed).__name__}; it must return the model's config as a dict"
        )
    return changed, {name: value for name, value in changed.items() if hf_config.get(name) != value}


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(config)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _normalize_rope(hf_config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Configs of transformers 5 have `rope_parameters` in place of `rope_scaling` and `rope_theta`. Either set of names
    is accepted, whichever the checkpoint uses: otherwise the change would silently have no effect."""
    rope = hf_config.get("rope_parameters")
    old_names = {name: changes[name] for name in ("rope_scaling", "rope_theta") if name in changes}
    if not isinstance(rope, dict) or not rope or not old_names:
        return changes
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"hf_overrides has {', '.join(old_names)}, but this model has rope_parameters for each of "
            f"{', '.join(rope)}; give rope_parameters"
        )
    scaling = dict(old_names.get("rope_scaling") or {})
    if "rope_scaling" in old_names:
        given = [scaling.pop(name, None) for name in ROPE_TYPE]
        scaling["rope_type"] = next(filter(None, given), "default")
    if "rope_theta" in old_names:
        scaling["rope_theta"] = old_names["rope_theta"]
    rest = {name: value for name, value in changes.items() if name not in old_names}
    return merged(rest, {"rope_parameters": scaling})
