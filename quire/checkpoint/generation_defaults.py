"""Default sampling parameters from a model's generation_config.json."""

import difflib
from pathlib import Path
from typing import Any

from quire.checkpoint.config import load_generation_config, read_json
from quire.checkpoint.resolve import Checkpoint
from quire.config.model import ModelConfig
from quire.messages.sampling_params import SamplingParams

FILE = "generation_config.json"
# transformers' names and ours. Other keys, such as do_sample, are ignored.
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling(checkpoint: Checkpoint, model: ModelConfig) -> tuple[dict[str, Any], str]:
    """Values by SamplingParams field, and their source for the log."""
    found, source = _file(checkpoint, model.generation_config)
    remedy = "correct it, or leave the file out with --generation-config quire"
    defaults = _checked({key: value for key, value in found.items() if key in NAMES}, source, remedy)
    changes = model.override_generation_config or {}
    for key in changes:
        if key not in NAMES:
            near = difflib.get_close_matches(key, NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(NAMES)}"
            raise ValueError(f"override_generation_config has {key!r}; {hint}")
    option = "override_generation_config"
    overriding = _checked(changes, option, "correct it (--override-generation-config)")
    sources = [name for name, values in ((source, defaults), (option, overriding)) if values]
    for key, value in changes.items():
        if value is None:  # null removes a value of the file
            defaults.pop(NAMES[key], None)
    return defaults | overriding, " and ".join(sources)


def _file(checkpoint: Checkpoint, setting: str) -> tuple[dict[str, Any], str]:
    if setting in ("quire", "vllm"):
        return {}, ""
    if setting == "auto":
        return load_generation_config(checkpoint), str(checkpoint.path / FILE)
    file = Path(setting).expanduser() / FILE
    content = read_json(file)
    if content is None:
        raise ValueError(
            f"generation_config is {setting!r}, but there is no {file}; allowed: auto, quire or a folder that has one "
            "(--generation-config)"
        )
    return content, str(file)


def _checked(values: dict[str, Any], source: str, remedy: str) -> dict[str, Any]:
    checked = {}
    for key, value in values.items():
        if value is None:
            continue
        try:
            SamplingParams(**{NAMES[key]: value})
        except (ValueError, TypeError) as error:
            problem = str(error).replace(NAMES[key], key, 1)
            raise ValueError(f"{source}: {problem}; {remedy}") from None
        checked[NAMES[key]] = value
    return checked
