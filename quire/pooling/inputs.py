"""Checks and completes the parameters of a request that pools."""

from typing import Any

from quire.config.pooling import EMBED, TOKEN_EMBED, TOKEN_TASKS, PoolingSetup
from quire.messages.pooling_params import PoolingParams
from quire.pooling.registry import DEFAULT_POOLING_TYPE, find_pooling_type

WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")  # in config.json, by family
# Of a model that generates: its hidden states are vectors too.
DECODER = PoolingSetup(EMBED, (EMBED, TOKEN_EMBED), DEFAULT_POOLING_TYPE)


def hidden_size(hf_config: dict[str, Any]) -> int | None:
    """The width of a model's hidden states; None if its config does not say."""
    text = hf_config.get("text_config")
    configs = (hf_config, text) if isinstance(text, dict) else (hf_config,)
    found = (config.get(name) for config in configs for name in WIDTHS)
    return next((width for width in found if isinstance(width, int)), None)


def embedding_size(hf_config: dict[str, Any], setup: PoolingSetup | None) -> int | None:
    """The width of a model's embeddings."""
    dense = (setup.dense or setup.token_dense) if setup is not None else ()
    return dense[-1].width if dense and dense[-1].width is not None else hidden_size(hf_config)


def complete_pooling(params: PoolingParams, setup: PoolingSetup | None, width: int | None) -> PoolingParams:
    """With its defaults filled in. `width`: of the model's embeddings."""
    setup = setup or DECODER
    given = None if params.pooling_type is None else params.pooling_type.upper()
    named = None if given is None else find_pooling_type(given)
    task = params.task or (TOKEN_EMBED if named is not None and named.tokens else setup.task)
    if task not in setup.tasks:
        raise ValueError(f"task is {task!r}, which this model does not have; it has: {', '.join(setup.tasks)}")
    tokenwise = task in TOKEN_TASKS
    name = given or (setup.token_pooling_type if tokenwise else setup.pooling_type)
    if name is not None and find_pooling_type(name).tokens != tokenwise:
        what = "a vector for each token" if tokenwise else "one vector"
        raise ValueError(f"pooling_type is {name}, but task {task} gives {what}; leave it out")
    whole = name is None or find_pooling_type(name).whole_prompt
    if whole and params.skip_reading_prefix_cache is False:
        raise ValueError(
            f"skip_reading_prefix_cache is false, but pooling_type {name} needs every token of the prompt computed; "
            "leave it out"
        )
    embeds = task in (EMBED, TOKEN_EMBED)
    activation = params.use_activation if params.use_activation is not None else setup.use_activation
    return params.replace_unchecked(
        task=task,
        pooling_type=name,
        dimensions=_dimensions(params.dimensions, setup, width, task),
        use_activation=activation if activation is not None else not embeds or setup.normalize,
        step_tag_id=_step_tag(params, setup),
        returned_token_ids=_returned(params, setup),
        skip_reading_prefix_cache=params.skip_reading_prefix_cache or whole,
    )


def _dimensions(given: int | None, setup: PoolingSetup, width: int | None, task: str) -> int | None:
    embeds = task in (EMBED, TOKEN_EMBED)
    if given is None:
        return setup.dimensions if embeds else None
    if not embeds:
        raise ValueError(f"dimensions is {given}, but task {task} gives classes, not embeddings; leave it out")
    if setup.matryoshka is False:
        raise ValueError(
            f"dimensions is {given}, but the model does not support Matryoshka embeddings; leave it out, or start "
            """with --hf-overrides '{"is_matryoshka": true}'"""
        )
    if isinstance(setup.matryoshka, tuple) and given not in setup.matryoshka:
        allowed = ", ".join(map(str, setup.matryoshka))
        raise ValueError(f"dimensions is {given}; the model's Matryoshka dimensions are {allowed}")
    if width is None or given > width:
        allowed = "which the model's config does not tell: leave it out" if width is None else f"here {width}"
        raise ValueError(f"dimensions is {given}; it can be at most the hidden size, {allowed}")
    return given


def _step_tag(params: PoolingParams, setup: PoolingSetup) -> int | None:
    if params.step_tag_id is not None and setup.token_pooling_type != "STEP":
        raise ValueError("step_tag_id is for models whose pooling_type is STEP; leave it out")
    return params.step_tag_id if params.step_tag_id is not None else setup.step_tag_id


def _returned(params: PoolingParams, setup: PoolingSetup) -> list[int] | None:
    given = params.returned_token_ids
    if given is None:
        return list(setup.returned_token_ids) or None
    wrong = next((one for one in given if one >= setup.num_labels), None)
    if wrong is not None or setup.token_pooling_type != "STEP":
        raise ValueError(
            f"returned_token_ids are outputs of a head whose pooling_type is STEP, here of {setup.num_labels}; leave "
            "them out, or name tokens at the start (--pooler-config)"
        )
    return given
