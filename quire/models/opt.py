"""OPT."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames, renamed
from quire.models.loading.weight_map import Rule, WeightMap

LAYER, OURS = "model.decoder.layers.{i}", "layers.{i}"
NAMES = ModuleNames(LAYER, "self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj", "", ("fc1",), "fc2")
DEFAULTS = {"activation_function": "relu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
# OPT-350M and early finetunes differ.
ONLY = {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}


class OPTForCausalLM(DecoderModel):
    """Learned positions, of which the first two are never used; LayerNorm, biases, ReLU."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        Rule("model.decoder.embed_tokens.weight", "embed_tokens.weight"),
        Rule("model.decoder.embed_positions.weight", "embed_positions.weight"),
        Rule(f"{LAYER}.self_attn_layer_norm.{{p}}", f"{OURS}.attention_norm.{{p}}"),
        *(Rule(f"{LAYER}.self_attn.{x}_proj.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", x) for x in ("q", "k", "v")),
        Rule(f"{LAYER}.self_attn.out_proj.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
        Rule(f"{LAYER}.final_layer_norm.{{p}}", f"{OURS}.mlp_norm.{{p}}"),
        Rule(f"{LAYER}.fc1.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
        Rule(f"{LAYER}.fc2.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
        Rule("model.decoder.final_layer_norm.{p}", "norm.{p}"),
    ).also_without("model.")

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        supported = ONLY | {"word_embed_proj_dim": hf.get("hidden_size")}
        for key, value in supported.items():
            if hf.get(key) not in (None, value):
                raise ValueError(
                    f"OPT with {key} {hf[key]} is not supported, only with {value}; try --model-impl transformers"
                )
        hf = renamed(DEFAULTS | hf, intermediate_size="ffn_dim", hidden_act="activation_function")
        bias = bool(hf.get("enable_bias", True))
        return DecoderConfig.from_hf(
            hf,
            ropes=(None,) * hf["num_hidden_layers"],
            names=NAMES,
            num_positions=hf["max_position_embeddings"],
            position_offset=2,
            norm="layer",
            norm_bias=True,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            gated=False,
        )
