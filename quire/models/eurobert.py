"""EuroBERT."""

from typing import Any, ClassVar

from quire.models.bert import CLASSIFIER
from quire.models.decoder import DECODER_WEIGHTS
from quire.models.decoder_config import DecoderConfig
from quire.models.encoder import PoolingModel
from quire.models.encoder_config import HeadConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap


class EuroBertModel(PoolingModel):
    """Llama whose tokens see each other. Of its heads for sequences, the usual one pools logits: not served."""

    default_pooling: ClassVar[str] = "MEAN"
    heads: ClassVar[dict[Task, HeadConfig]] = {"token": HeadConfig("ALL")}
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {"token": (CLASSIFIER,)}
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.also_without("model.").ignoring("lm_head.{p}")

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            {"rms_norm_eps": 1e-5, "rope_theta": 250_000.0} | hf,
            causal=False,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )
