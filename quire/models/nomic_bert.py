"""Nomic's BERT, as its checkpoints (whose config names remote code that is not run) and transformers have it."""

from typing import Any, ClassVar

from quire.layers.rotary import RopeParameters
from quire.models.bert import OURS, BertModel
from quire.models.decoder_config import ModuleNames, renamed
from quire.models.encoder import with_legacy_norms
from quire.models.encoder_config import EncoderConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap

NAMES = ModuleNames("encoder.layers.{i}", "attn", ("Wqkv",), "out_proj", "mlp", ("fc12", "fc11"), "fc2")


def rotary_bert_weights(prefix: str) -> WeightMap:
    """transformers' names for BERTs with rotary embeddings and a gated MLP."""
    layer, embeddings = f"{prefix}layers.{{i}}", f"{prefix}embeddings"
    rules = (
        *(Rule(f"{layer}.self_attn.{name}_proj.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", name) for name in "qkv"),
        Rule(f"{layer}.self_attn.o_proj.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
        Rule(f"{layer}.post_attention_layernorm.{{p}}", f"{OURS}.attention_sum_norm.{{p}}"),
        Rule(f"{layer}.mlp.gate_proj.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
        Rule(f"{layer}.mlp.up_proj.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 1),
        Rule(f"{layer}.mlp.down_proj.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
        Rule(f"{layer}.post_mlp_layernorm.{{p}}", f"{OURS}.mlp_sum_norm.{{p}}"),
        Rule(f"{embeddings}.word_embeddings.weight", "embed_tokens.weight"),
        Rule(f"{embeddings}.token_type_embeddings.weight", "embed_tokens.types"),
        Rule(f"{embeddings}.LayerNorm.{{p}}", "embedding_norm.{p}"),
    )
    return with_legacy_norms(WeightMap(rules)).also_without(prefix)


def original_weights(prefix: str) -> WeightMap:
    layer = f"{prefix}encoder.layers.{{i}}"
    rules = (
        Rule(f"{layer}.attn.Wqkv.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", ("q", "k", "v")),
        Rule(f"{layer}.attn.out_proj.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
        Rule(f"{layer}.norm1.{{p}}", f"{OURS}.attention_sum_norm.{{p}}"),
        Rule(f"{layer}.mlp.fc12.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
        Rule(f"{layer}.mlp.fc11.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 1),
        Rule(f"{layer}.mlp.fc2.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
        Rule(f"{layer}.norm2.{{p}}", f"{OURS}.mlp_sum_norm.{{p}}"),
        Rule(f"{prefix}emb_ln.{{p}}", "embedding_norm.{p}"),
        Rule(f"{prefix}embeddings.word_embeddings.weight", "embed_tokens.weight"),
        Rule(f"{prefix}embeddings.token_type_embeddings.weight", "embed_tokens.types"),
    )
    return WeightMap(rules).also_without(prefix)


class NomicBertModel(BertModel):
    """BERT with rotary embeddings and a gated MLP, almost without biases."""

    default_pooling: ClassVar[str] = "MEAN"
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {
        "sequence": (Rule("nomic_bert.pooler.dense.{p}", "head.dense.{p}"), *BertModel.head_rules["sequence"]),
        "token": BertModel.head_rules["token"],
    }
    weights: ClassVar[WeightMap] = (
        rotary_bert_weights("nomic_bert.")
        .with_rules(*original_weights("nomic_bert.").rules, *original_weights("bert.").rules)
        .ignoring("cls.predictions.transform.layer_norm.{p}")
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        for key, wanted in (("prenorm", False), ("parallel_block", False), ("use_rms_norm", False)):
            if hf.get(key, wanted) not in (wanted, None):
                raise ValueError(f"NomicBERT with {key} is not supported")
        if hf.get("rotary_emb_interleaved") or hf.get("rotary_scaling_factor"):
            raise ValueError("NomicBERT with interleaved or scaled rotary embeddings is not supported")
        if hf.get("num_experts") or hf.get("moe_every_n_layers", 0) > 0:
            raise ValueError("NomicBERT with experts is not supported")
        hf = renamed(
            {"layer_norm_eps": 1e-12, "rotary_emb_base": 1000.0} | hf,
            hidden_size="n_embd",
            intermediate_size="n_inner",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            max_position_embeddings="n_positions",
            layer_norm_eps="layer_norm_epsilon",
            hidden_act="activation_function",
            partial_rotary_factor="rotary_emb_fraction",
        )
        hf = renamed({"rope_theta": hf["rotary_emb_base"]} | hf, rms_norm_eps="layer_norm_eps")
        hf["hidden_act"] = {"swiglu": "silu", "geglu": "gelu"}.get(hf.get("hidden_act") or "silu", hf.get("hidden_act"))
        rope = RopeParameters.from_hf(hf, hf["hidden_size"] // hf["num_attention_heads"])
        return cls.encoder_config(
            hf,
            ropes=(rope,) * hf["num_hidden_layers"],
            names=NAMES,
            qkv_bias=bool(hf.get("qkv_proj_bias", False)),
            o_bias=bool(hf.get("qkv_proj_bias", False)),
            mlp_bias=bool(hf.get("mlp_fc1_bias", False)),
            gated=True,
        )
