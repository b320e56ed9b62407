"""Which implementation serves a model: ours, transformers', or none. Needs no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.models.registry import ModelRegistry, Registry
from quire.models.transformers.library import unsupported_reason


@dataclass(frozen=True)
class ImplementationChoice:
    impl: Literal["quire", "transformers", None]  # None: the model cannot be served
    reason: str


def choose_implementation(
    hf_config: dict[str, Any],
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    is_gguf: bool = False,
    registry: Registry = ModelRegistry,
) -> ImplementationChoice:
    """`model_impl` is the user's option: "auto" prefers our own implementation."""
    names = ", ".join(hf_config.get("architectures") or ()) or "no architecture"
    found = registry.find(hf_config)
    if found is not None and model_impl != "transformers":
        return ImplementationChoice("quire", f"{found} is {registry.origin(found)}")
    missing = registry.missing(hf_config) if found is None else None
    if model_impl == "quire" or (missing is not None and model_impl == "auto"):
        return ImplementationChoice(None, registry.refusal(hf_config))
    problem = _transformers_problem(hf_config, trust_remote_code, is_gguf)
    if problem is None:
        reason = "as requested (--model-impl)" if model_impl == "transformers" else "it is none of ours"
        return ImplementationChoice("transformers", f"{names} runs with transformers' code: {reason}")
    if model_impl == "transformers":
        return ImplementationChoice(None, f"{names} with model_impl 'transformers': {problem}")
    return ImplementationChoice(None, f"{registry.refusal(hf_config)}; with transformers' code: {problem}")


def _transformers_problem(hf_config: dict[str, Any], trust_remote_code: bool, is_gguf: bool) -> str | None:
    if is_gguf:
        return "GGUF files are read by built-in families only; use the model's safetensors folder"
    return unsupported_reason(hf_config, trust_remote_code)
