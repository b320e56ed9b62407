"""Arguments of `LLM`'s methods in their accepted forms, and its progress bar."""

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, TypeVar

from quire.config.shown import shown
from quire.engine.outputs import RequestOutput
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput

Params = TypeVar("Params", SamplingParams, PoolingParams)
# What takes the other kind of parameters.
OTHER_METHODS = {SamplingParams: "encode and embed take PoolingParams", PoolingParams: "generate takes SamplingParams"}


class Progress:
    def __init__(self, total: int, doing: str, bar: Callable[..., Any] | None = None) -> None:
        from tqdm import tqdm

        self.bar = (bar or tqdm)(total=total, desc=doing, unit="prompt", dynamic_ncols=True)
        self.tokens = 0

    def update(self, output: RequestOutput | PoolingRequestOutput[PoolingOutput]) -> None:
        if isinstance(output, RequestOutput):
            self.tokens += sum(len(c.token_ids) for c in output.outputs)
        else:
            self.tokens += len(output.prompt_token_ids)
        rate = self.tokens / max(1e-9, self.bar.format_dict["elapsed"])
        self.bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def per_prompt(params: Params | Sequence[Params], kind: type[Params], count: int) -> list[Params]:
    if isinstance(params, kind):
        return [params] * count
    given = [params] if isinstance(params, (SamplingParams, PoolingParams)) else list(params)
    wrong = next((one for one in given if not isinstance(one, kind)), None)
    if wrong is not None:
        raise ValueError(f"this takes {kind.__name__}, got {type(wrong).__name__}; {OTHER_METHODS[kind]}")
    if len(given) != count:
        name = "sampling_params" if kind is SamplingParams else "pooling_params"
        raise ValueError(f"{count} prompts but {len(given)} {name}; give one for all, or one for each")
    return given


def as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts; a string, a dict or a list of token ids is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {shown(prompts)}; it must be a prompt, or a list of prompts")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts  # numpy's integers too


def is_conversation(messages: Any) -> bool:
    """Whether this is one conversation; several are a list of lists."""
    return not messages or not isinstance(messages, (list, tuple)) or not isinstance(messages[0], (list, tuple))


def truncating(params: list[SamplingParams], keep: int | None) -> list[SamplingParams]:
    return params if keep is None else [one.replace(truncate_prompt_tokens=keep) for one in params]
