"""Falcon, all sizes."""

from typing import Any

from quire.models.decoder import DECODER_WEIGHTS, UNGATED, DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames, renamed
from quire.models.loading.transforms import qkv_by_head
from quire.models.loading.weight_map import Rule, WeightMap

LAYER, OURS = "transformer.h.{i}", "layers.{i}"
NAMES = ModuleNames(LAYER, "self_attention", ("query_key_value",), "dense", "mlp", ("dense_h_to_4h",), "dense_4h_to_h")
DEFAULTS = {"activation": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


class FalconForCausalLM(DecoderModel):
    """Falcon 7B (one KV head), 11B, 40B, 180B (groups, two norms) and RW (ALiBi, biases, MLP after attention)."""

    def family_weights(self) -> WeightMap:
        c = self.config
        by_head = qkv_by_head(c.num_kv_heads, c.head_dim)
        rules = [
            *UNGATED,
            Rule("transformer.word_embeddings.weight", "embed_tokens.weight"),
            Rule(f"{LAYER}.input_layernorm.{{p}}", f"{OURS}.attention_norm.{{p}}"),
            Rule(f"{LAYER}.ln_attn.{{p}}", f"{OURS}.attention_norm.{{p}}"),
            Rule(
                f"{LAYER}.self_attention.query_key_value.{{p}}",
                f"{OURS}.self_attn.qkv_proj.{{p}}",
                ("q", "k", "v"),
                by_head,
            ),
            Rule(f"{LAYER}.self_attention.dense.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
            Rule(f"{LAYER}.post_attention_layernorm.{{p}}", f"{OURS}.mlp_norm.{{p}}"),
            Rule(f"{LAYER}.ln_mlp.{{p}}", f"{OURS}.mlp_norm.{{p}}"),
            Rule(f"{LAYER}.mlp.dense_h_to_4h.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
            Rule(f"{LAYER}.mlp.dense_4h_to_h.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
            Rule("transformer.ln_f.{p}", "norm.{p}"),
        ]
        if c.parallel and c.mlp_norm:  # as GGUF names the two
            rules += [
                Rule("model.layers.{i}.ln_attn.{p}", f"{OURS}.attention_norm.{{p}}"),
                Rule("model.layers.{i}.input_layernorm.{p}", f"{OURS}.mlp_norm.{{p}}"),
            ]
        return DECODER_WEIGHTS.with_rules(*rules)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        grouped = bool(hf.get("new_decoder_architecture", False))
        parallel = grouped or bool(hf.get("parallel_attn", True))
        two_norms = (hf.get("num_ln_in_parallel_attn") or 2) == 2 if grouped else not parallel
        bias = bool(hf.get("bias", False))
        hf = renamed(
            DEFAULTS | hf,
            hidden_size="n_embed",
            intermediate_size="ffn_hidden_size",
            hidden_act="activation",
            rms_norm_eps="layer_norm_epsilon",
            num_key_value_heads="num_kv_heads",
        )
        hf.setdefault("intermediate_size", 4 * hf["hidden_size"])
        heads, head_dim = hf["num_attention_heads"], hf["hidden_size"] // hf["num_attention_heads"]
        if not grouped:
            hf["num_key_value_heads"] = 1 if hf.get("multi_query", True) else heads
        alibi = bool(hf.get("alibi", False))
        return DecoderConfig.from_hf(
            hf,
            head_dim=head_dim,
            ropes=(None,) * hf["num_hidden_layers"] if alibi else None,
            names=NAMES,
            norm="layer",
            norm_bias=True,
            parallel=parallel,
            mlp_norm=two_norms,
            qkv_bias=bias,
            o_bias=bias,
            # Added before scores are scaled. transformers rounds slope times position to bfloat16; this does not.
            alibi=head_dim**-0.5 if alibi else 0.0,
            mlp_bias=bias,
            gated=False,
        )
