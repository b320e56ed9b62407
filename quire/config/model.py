from dataclasses import dataclass
from typing import Any

from quire.config.fields import internal, option, validate

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("fp8", "fp8_per_tensor", "compressed-tensors", "gguf", "dequantized", "int8", "int4")


@dataclass
class ModelConfig:
    """Which model, and in what precision."""

    model: str | None = option(None, "HF folder, .gguf file or hub id; without it the embedded SmolLM2-135M-Instruct")
    tokenizer: str | None = option(None, "tokenizer folder, tokenizer.json or hub id, if not the model's own")
    chat_template: str | None = option(None, "Jinja file or text for chats, if not the tokenizer's own template")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    dtype: str = option(
        "auto", "compute precision; auto takes the fastest the platform and model share", choices=DTYPES
    )
    quantization: str | None = option(
        None,
        "of the weights; default: as the checkpoint is; fp8 (GPU), int8 and int4 (CPU) quantize while loading; "
        "dequantized: GGUF weights become dtype",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output in tokens; default, -1 or auto: the model's own, or what fits memory",
        minimum=1,
        words=("auto",),
    )
    max_logprobs: int = option(20, "most logprobs a request may ask for", minimum=-1)
    logprobs_mode: str = option(
        "raw_logprobs", "logprobs or logits, before or after penalties, masks and temperature", choices=LOGPROBS_MODES
    )
    logits_processors: tuple[str | type, ...] = option((), "your own class as module:Class")
    skip_tokenizer_init: bool = option(False, "serve token ids only; no tokenizer is loaded")
    seed: int = option(0, "base seed for requests that bring none", minimum=0)

    hf_config: dict[str, Any] = internal({})  # the model's config.json, or the same read out of a GGUF
    eos_token_ids: tuple[int, ...] = internal(())
    vocab_size: int = internal(0)
    longest: int = internal(2048)  # what the model's position embeddings allow

    def __post_init__(self) -> None:
        if self.max_model_len in ("auto", -1):
            self.max_model_len = None
        self.logits_processors = _processors(self.logits_processors)
        validate(self)


def _processors(given: Any) -> tuple[str | type, ...]:
    return (given,) if isinstance(given, (str, type)) else tuple(given or ())
