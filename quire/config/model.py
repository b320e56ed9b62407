"""Options of the model, and values read from its files at start-up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.config.fields import internal, option, require_object, validate

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"} | {f"torch.{name}": name for name in DTYPES[1:]}
QUANTIZATIONS = (
    "fp8", "fp8_per_tensor", "compressed-tensors", "gptq", "awq", "mxfp4", "modelopt", "bitsandbytes", "gguf",
    "dequantized", "int8", "int8_per_channel", "int4",
)  # fmt: skip
# vLLM names its kernels too.
QUANTIZATION_ALIASES = {
    "gptq_marlin": "gptq", "auto_gptq": "gptq", "awq_marlin": "awq", "auto_awq": "awq", "modelopt_fp4": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
}  # fmt: skip
MODEL_IMPLS = ("auto", "quire", "transformers", "vllm")

Overrides = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class ModelConfig:
    """Which model, and in what precision."""

    model: str | None = option(None, "HF folder, .gguf file or hub id; without it the embedded SmolLM2-135M-Instruct")
    tokenizer: str | None = option(None, "tokenizer folder, tokenizer.json or hub id, if not the model's own")
    tokenizer_mode: str = option(
        "auto",
        "auto or hf: tokenizer.json if there is one; slow: transformers' tokenizer in Python",
        choices=("auto", "hf", "slow"),
    )
    tokenizer_revision: str | None = option(None, "branch, tag or commit of the tokenizer, if not the model's")
    chat_template: str | None = option(None, "Jinja file or text for chats, if not the tokenizer's own template")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    hf_token: str | bool | None = option(
        None, "token for gated and private hub models; without a value: the stored one", several="optional"
    )
    hf_config_path: str | None = option(None, "folder or hub id with the config.json to use, if not the model's own")
    config_format: str = option("auto", "format of the model's config: Hugging Face's", choices=("auto", "hf"))
    model_impl: str = option(
        "auto",
        "implementation: ours, transformers', or auto: ours if there is one; vllm means quire",
        choices=MODEL_IMPLS,
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the checkpoint")
    code_revision: str | None = option(
        None, "branch, tag or commit of that code, where the checkpoint names another hub repository for it"
    )
    model_class_overrides: dict[str, Any] | None = option(
        None, 'your own classes by architecture, as JSON: {"LlamaForCausalLM": "module:Class"}'
    )
    hf_overrides: Overrides | None = option(
        None, 'changes to the model\'s config.json, as JSON: {"max_position_embeddings": 8192}'
    )
    generation_config: str = option(
        "auto",
        "sampling defaults for requests: auto: the model's generation_config.json; quire (or vllm): none of the "
        "model's; else a folder with such a file",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, 'changes to those defaults, as JSON: {"temperature": 0.6}'
    )
    dtype: str = option(
        "auto",
        "compute precision; auto: the fastest that platform and model share; half and float are float16 and float32",
        choices=DTYPES,
        aliases=DTYPE_ALIASES,
    )
    quantization: str | None = option(
        None,
        "of the weights; default: as the checkpoint is; fp8 and bitsandbytes (GPU), int8, int4 and int8_per_channel "
        "(CPU) quantize while loading; dequantized: quantized weights become dtype",
        choices=QUANTIZATIONS,
        aliases=QUANTIZATION_ALIASES,
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output in tokens; default, -1 or auto: the model's own, or what fits memory",
        minimum=1,
        words=("auto",),
    )
    disable_sliding_window: bool = option(False, "no sequence longer than the model's sliding window")
    max_logprobs: int = option(20, "most logprobs a request may ask for", minimum=-1)
    logprobs_mode: str = option(
        "raw_logprobs", "logprobs or logits, before or after penalties, masks and temperature", choices=LOGPROBS_MODES
    )
    logits_processors: tuple[str | type, ...] = option((), "your own class as module:Class", several="many")
    skip_tokenizer_init: bool = option(False, "serve token ids only; no tokenizer is loaded")
    enable_sleep_mode: bool = option(False, "let sleep() give back the memory of weights and KV cache (levels 1 and 2)")
    enable_prompt_embeds: bool = option(False, "accept prompts that are embeddings instead of token ids")
    seed: int = option(0, "base seed for requests that bring none", minimum=0)

    hf_config: dict[str, Any] = internal({})  # the model's config.json, or its equivalent from a GGUF
    eos_token_ids: tuple[int, ...] = internal(())
    vocab_size: int = internal(0)
    derived_max_model_len: int = internal(2048)  # limit of the model's position embeddings
    default_sampling: dict[str, Any] = internal({})  # defaults of SamplingParams

    def __post_init__(self) -> None:
        if self.max_model_len in ("auto", -1):
            self.max_model_len = None
        if self.model_impl == "vllm":
            self.model_impl = "quire"
        if not callable(self.hf_overrides):
            require_object("hf_overrides", self.hf_overrides)
        require_object("override_generation_config", self.override_generation_config)
        require_object("model_class_overrides", self.model_class_overrides)
        for target in (self.model_class_overrides or {}).values():
            if not isinstance(target, str) or ":" not in target:
                raise ValueError(
                    f"model_class_overrides has {target!r}; write 'module:Class' (--model-class-overrides)"
                )
        self.logits_processors = _processors(self.logits_processors)
        validate(self)


def _processors(given: Any) -> tuple[str | type, ...]:
    return (given,) if isinstance(given, (str, type)) else tuple(given or ())
