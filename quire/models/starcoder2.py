"""StarCoder2."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, UNGATED, DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames, renamed
from quire.models.loading.weight_map import Rule, WeightMap

DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


class Starcoder2ForCausalLM(DecoderModel):
    """LayerNorm, biases and an MLP without a gate; a window on every layer."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        *UNGATED,
        Rule("model.layers.{i}.mlp.c_fc.{p}", "layers.{i}.mlp.up_proj.{p}", 0),
        Rule("model.layers.{i}.mlp.c_proj.{p}", "layers.{i}.mlp.down_proj.{p}"),
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("use_bias", True))
        return DecoderConfig.from_hf(
            renamed(DEFAULTS | hf, rms_norm_eps="norm_epsilon"),
            windows=(hf.get("sliding_window"),) * hf["num_hidden_layers"],
            names=ModuleNames(up=("c_fc",), down="c_proj"),
            norm="layer",
            norm_bias=True,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            gated=False,
        )
