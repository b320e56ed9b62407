"""Checks and completes the parameters of a request that pools."""

from typing import Any

from quire.messages.pooling_params import PoolingParams
from quire.pooling.registry import DEFAULT_POOLING_TYPE, find_pooling_type

WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")  # in config.json, by family


def hidden_size(hf_config: dict[str, Any]) -> int | None:
    """The width of a model's hidden states; None if its config does not say."""
    text = hf_config.get("text_config")
    configs = (hf_config, text) if isinstance(text, dict) else (hf_config,)
    found = (config.get(name) for config in configs for name in WIDTHS)
    return next((width for width in found if isinstance(width, int)), None)


def complete_pooling(params: PoolingParams, width: int | None) -> PoolingParams:
    """With its defaults filled in. `width`: of the model's hidden states."""
    name = (params.pooling_type or DEFAULT_POOLING_TYPE).upper()
    found = find_pooling_type(name)
    if found.whole_prompt and params.skip_reading_prefix_cache is False:
        raise ValueError(
            f"skip_reading_prefix_cache is false, but pooling_type {name} needs every token of the prompt computed; "
            "leave it out"
        )
    if params.dimensions is not None and (width is None or params.dimensions > width):
        allowed = "which the model's config does not tell: leave it out" if width is None else f"here {width}"
        raise ValueError(f"dimensions is {params.dimensions}; it can be at most the hidden size, {allowed}")
    return params.replace_unchecked(
        task=params.task or "embed",
        pooling_type=name,
        use_activation=params.use_activation is not False,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache or found.whole_prompt,
    )
