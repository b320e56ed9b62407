"""What both engines have beside their own methods, for programs written for vLLM."""

from typing import Any

from quire.checkpoint.config import text_part
from quire.compat.unavailable import UnavailableMethods
from quire.config import EngineConfig, ModelConfig
from quire.tokenizer.tokenizer import Tokenizer
from quire.tokenizer.user_tokenizer import UserTokenizer

NO_TOKENIZER = "there is no tokenizer: the engine was created with skip_tokenizer_init"


class HFConfig(dict[str, Any]):
    """A model's config.json; its values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the model's config has no {name!r}")
        value = self[name]
        return HFConfig(value) if isinstance(value, dict) else value

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


class ModelView:
    """An engine's `model_config`, as resolved. Attributes that are not named here are those of `ModelConfig`."""

    def __init__(self, config: ModelConfig, name: str, max_model_len: int) -> None:
        self._config = config
        self.model = config.model or name
        self.served_model_name = name
        self.tokenizer = config.tokenizer or self.model
        self.max_model_len = max_model_len
        self.hf_config = HFConfig(config.hf_config)
        self.hf_text_config = HFConfig(text_part(config.hf_config))
        self.is_multimodal_model = False
        self.runner_type = "generate"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)

    def get_vocab_size(self) -> int:
        return self._config.vocab_size

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The sampling defaults that the model brings."""
        return dict(self._config.default_sampling)


class VllmInterface(UnavailableMethods):
    config: EngineConfig
    model_name: str
    max_model_len: int
    tokenizer: Tokenizer | None

    @property
    def vllm_config(self) -> EngineConfig:
        return self.config

    @property
    def model_config(self) -> ModelView:
        return ModelView(self.config.model, self.model_name, self.max_model_len)

    def get_tokenizer(self) -> UserTokenizer:
        """The model's tokenizer with the methods of transformers' that programs use."""
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return UserTokenizer(self.tokenizer, self.model_name, self.max_model_len)


def refuse_loggers(stat_loggers: Any) -> None:
    if stat_loggers:
        raise ValueError("stat_loggers is not available yet: loggers of the user's own; read get_metrics()")
