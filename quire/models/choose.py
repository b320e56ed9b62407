"""Whose code runs a model: ours, transformers', or nobody's. Needs no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.models.registry import ModelRegistry, Registry
from quire.models.transformers.class_import import why_not


@dataclass(frozen=True)
class Choice:
    impl: Literal["quire", "transformers", None]  # None: it cannot be served
    why: str


def choose_implementation(
    hf_config: dict[str, Any],
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    is_gguf: bool = False,
    registry: Registry = ModelRegistry,
) -> Choice:
    """`model_impl` is the user's word: "auto" takes our own code where there is some."""
    given = ", ".join(hf_config.get("architectures") or ()) or "no architecture"
    native = registry.find(hf_config)
    if native is not None and model_impl != "transformers":
        return Choice("quire", f"{native} is {registry.origin(native)}")
    if model_impl == "quire":
        return Choice(None, registry.refusal(hf_config))
    problem = _transformers_problem(hf_config, trust_remote_code, is_gguf)
    if problem is None:
        reason = "as asked (--model-impl)" if model_impl == "transformers" else "it is none of ours"
        return Choice("transformers", f"{given} runs with transformers' code: {reason}")
    if model_impl == "transformers":
        return Choice(None, f"{given} with model_impl 'transformers': {problem}")
    return Choice(None, f"{registry.refusal(hf_config)}; with transformers' code: {problem}")


def _transformers_problem(hf_config: dict[str, Any], trust_remote_code: bool, is_gguf: bool) -> str | None:
    if is_gguf:
        return "GGUF files are read by our own families only; use the model's safetensors folder"
    return why_not(hf_config, trust_remote_code)
