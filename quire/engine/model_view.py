"""What programs read of an engine's `model_config`: the model's options as resolved, under vLLM's names."""

from typing import Any

from quire.config import ModelConfig
from quire.engine.resolve_config import text_part


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
    """Attributes that are not named here are those of `ModelConfig`."""

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
