"""Methods of vLLM's engines that belong to features to come: they exist, and say which feature when called."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams, check_truncation

Params = TypeVar("Params", bound=SamplingParams | PoolingParams)

TOKENIZATION = ("truncate_prompt_tokens", "add_special_tokens")
METHODS = {
    "scale_elastic_ep": "expert parallelism",
}


class UnavailableMethods:
    """Base of engines: a method that is not written yet raises NotImplementedError with the feature's name."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name not in METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{type(self).__name__}.{name} is not available yet: {METHODS[name]}")

        return refuse


def refuse_unavailable(mm_processor_kwargs: Any = None) -> None:
    """Arguments of requests for features to come: only None, or nothing at all, is accepted."""
    if mm_processor_kwargs:
        raise ValueError("mm_processor_kwargs is not available yet: prompts with images, audio or video; leave it out")


def tokenization(given: Mapping[str, Any] | None) -> tuple[int | None, bool]:
    """truncate_prompt_tokens and add_special_tokens of vLLM's `tokenization_kwargs`."""
    unknown = (given or {}).keys() - set(TOKENIZATION)
    if unknown:
        raise ValueError(f"tokenization_kwargs has {sorted(unknown)}; allowed: {', '.join(TOKENIZATION)}")
    keep = (given or {}).get("truncate_prompt_tokens")
    if keep is not None:
        check_truncation(keep)
    return keep, bool((given or {}).get("add_special_tokens", True))


def with_tokenization(
    prompt: Any,
    params: Params,
    tokenization_kwargs: Mapping[str, Any] | None,
    parse_many: Callable[[list[Any], bool], list[Any]],
) -> tuple[Any, Params]:
    """A request's prompt and parameters with its other arguments, as vLLM's engines have them."""
    keep, special = tokenization(tokenization_kwargs)
    if keep is not None:
        params = copy.copy(params)
        params.truncate_prompt_tokens = keep
    return prompt if special else parse_many([prompt], False)[0], params


def named(method: Any) -> str:
    """What can be sent to workers in another process: code cannot."""
    if not isinstance(method, str):
        raise ValueError("the engine is in another process: name a worker's method, or use LLM(multiprocess=False)")
    return method
