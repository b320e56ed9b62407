"""GPT-NeoX and Pythia."""

from typing import Any

from quire.models.decoder import DECODER_WEIGHTS, UNGATED, DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames, renamed
from quire.models.loading.transforms import qkv_by_head
from quire.models.loading.weight_map import Rule, WeightMap

LAYER, OURS = "gpt_neox.layers.{i}", "layers.{i}"
NAMES = ModuleNames(LAYER, "attention", ("query_key_value",), "dense", "mlp", ("dense_h_to_4h",), "dense_4h_to_h")
DEFAULTS = {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


class GPTNeoXForCausalLM(DecoderModel):
    """GPT-NeoX, Pythia: LayerNorm and biases, attention and MLP side by side, a part of each head rotated."""

    def family_weights(self) -> WeightMap:
        c = self.config
        by_head = qkv_by_head(c.num_heads, c.head_dim)
        return DECODER_WEIGHTS.with_rules(
            *UNGATED,
            Rule("gpt_neox.embed_in.weight", "embed_tokens.weight"),
            Rule(f"{LAYER}.input_layernorm.{{p}}", f"{OURS}.attention_norm.{{p}}"),
            Rule(
                f"{LAYER}.attention.query_key_value.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", ("q", "k", "v"), by_head
            ),
            Rule(f"{LAYER}.attention.dense.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
            Rule(f"{LAYER}.post_attention_layernorm.{{p}}", f"{OURS}.mlp_norm.{{p}}"),
            Rule(f"{LAYER}.mlp.dense_h_to_4h.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
            Rule(f"{LAYER}.mlp.dense_4h_to_h.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
            Rule("gpt_neox.final_layer_norm.{p}", "norm.{p}"),
            Rule("embed_out.weight", "lm_head.weight"),
        ).ignoring(
            f"{LAYER}.attention.bias", f"{LAYER}.attention.masked_bias", f"{LAYER}.attention.rotary_emb.inv_freq"
        )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        attention_bias = bool(hf.get("attention_bias", True))
        return DecoderConfig.from_hf(
            renamed(
                DEFAULTS | hf,
                rms_norm_eps="layer_norm_eps",
                rope_theta="rotary_emb_base",
                partial_rotary_factor="rotary_pct",
            ),
            names=NAMES,
            norm="layer",
            norm_bias=True,
            parallel=bool(hf.get("use_parallel_residual", True)),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=True,
            gated=False,
        )
