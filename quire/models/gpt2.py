"""GPT-2."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, UNGATED, DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames, renamed
from quire.models.loading.transforms import transposed
from quire.models.loading.weight_map import Rule, WeightMap

LAYER, OURS = "transformer.h.{i}", "layers.{i}"
NAMES = ModuleNames(LAYER, "attn", ("c_attn",), "c_proj", "mlp", ("c_fc",), "c_proj")
DEFAULTS = {"activation_function": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


class GPT2LMHeadModel(DecoderModel):
    """Learned positions, LayerNorm, biases everywhere; linears are stored transposed."""

    weights: ClassVar[WeightMap] = (
        DECODER_WEIGHTS.with_rules(
            *UNGATED,
            Rule("transformer.wte.weight", "embed_tokens.weight"),
            Rule("transformer.wpe.weight", "embed_positions.weight"),
            Rule(f"{LAYER}.ln_1.{{p}}", f"{OURS}.attention_norm.{{p}}"),
            Rule(f"{LAYER}.attn.c_attn.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", ("q", "k", "v"), transposed),
            Rule(f"{LAYER}.attn.c_proj.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}", None, transposed),
            Rule(f"{LAYER}.ln_2.{{p}}", f"{OURS}.mlp_norm.{{p}}"),
            Rule(f"{LAYER}.mlp.c_fc.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0, transposed),
            Rule(f"{LAYER}.mlp.c_proj.{{p}}", f"{OURS}.mlp.down_proj.{{p}}", None, transposed),
            Rule("transformer.ln_f.{p}", "norm.{p}"),
        )
        .ignoring(f"{LAYER}.attn.bias", f"{LAYER}.attn.masked_bias")
        .also_without("transformer.")
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if hf.get(key):
                raise ValueError(f"GPT-2 with {key} is not supported; try --model-impl transformers")
        hf = renamed(
            DEFAULTS | hf,
            hidden_size="n_embd",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            max_position_embeddings="n_positions",
            intermediate_size="n_inner",
            hidden_act="activation_function",
            rms_norm_eps="layer_norm_epsilon",
        )
        hf.setdefault("intermediate_size", 4 * hf["hidden_size"])
        return DecoderConfig.from_hf(
            hf,
            ropes=(None,) * hf["num_hidden_layers"],
            names=NAMES,
            num_positions=hf["max_position_embeddings"],
            norm="layer",
            norm_bias=True,
            attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            gated=False,
        )
