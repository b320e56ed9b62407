"""GTE ("NewModel" in its checkpoints, whose config names remote code that is not run), also as transformers has it."""

from dataclasses import replace
from typing import Any, ClassVar

from quire.layers.rotary import RopeParameters
from quire.models.bert import OURS, BertModel
from quire.models.decoder_config import ModuleNames, renamed
from quire.models.encoder_config import EncoderConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.nomic_bert import rotary_bert_weights

NAMES = ModuleNames("encoder.layer.{i}", "attention", ("qkv_proj",), "o_proj", "mlp", ("up_gate_proj",), "down_proj")


def original_weights(prefix: str) -> WeightMap:
    layer = f"{prefix}encoder.layer.{{i}}"
    rules = (
        Rule(f"{layer}.attention.qkv_proj.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", ("q", "k", "v")),
        Rule(f"{layer}.attention.o_proj.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
        Rule(f"{layer}.attn_ln.{{p}}", f"{OURS}.attention_sum_norm.{{p}}"),
        Rule(f"{layer}.mlp.up_gate_proj.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", (1, 0)),
        Rule(f"{layer}.mlp.down_proj.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
        Rule(f"{layer}.mlp_ln.{{p}}", f"{OURS}.mlp_sum_norm.{{p}}"),
        Rule(f"{prefix}embeddings.word_embeddings.weight", "embed_tokens.weight"),
        Rule(f"{prefix}embeddings.token_type_embeddings.weight", "embed_tokens.types"),
        Rule(f"{prefix}embeddings.LayerNorm.{{p}}", "embedding_norm.{p}"),
    )
    return WeightMap(rules).also_without(prefix)


class GteModel(BertModel):
    """BERT with rotary embeddings and a gated MLP."""

    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {
        "sequence": (
            Rule("new.pooler.dense.{p}", "head.dense.{p}"),
            Rule("gte.pooler.dense.{p}", "head.dense.{p}"),
            *BertModel.head_rules["sequence"],
        ),
        "token": BertModel.head_rules["token"],
    }
    weights: ClassVar[WeightMap] = (
        rotary_bert_weights("gte.")
        .with_rules(*original_weights("gte.").rules, *original_weights("new.").rules)
        .ignoring("lm_head.{p}", "lm_head.dense.{p}", "lm_head.norm.{p}", "lm_head.layer_norm.{p}")
        .ignoring("lm_head.decoder.{p}", "new.embeddings.position_ids", "embeddings.position_ids")
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        unusual = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}
        for key, usual in unusual.items():
            if hf.get(key, usual) not in (usual, None):
                raise ValueError(f"GTE with {key} {hf[key]!r} is not supported; it must be {usual!r}")
        hf = renamed({"layer_norm_eps": 1e-12, "hidden_act": "gelu"} | hf, rms_norm_eps="layer_norm_eps")
        head_dim = hf["hidden_size"] // hf["num_attention_heads"]
        return cls.encoder_config(
            hf, ropes=(_rope(hf, head_dim),) * hf["num_hidden_layers"], names=NAMES, gated=True, up_bias=False
        )


def _rope(hf: dict[str, Any], head_dim: int) -> RopeParameters:
    hf = {"rope_theta": 160_000.0} | hf
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("type") == "ntk":
        # A larger base, and all frequencies a little lower.
        factor = float(scaling.get("factor") or 1.0)
        linear = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
        rope = RopeParameters.from_hf(hf | {"rope_scaling": linear, "rope_theta": hf["rope_theta"] * factor}, head_dim)
        return replace(rope, max_positions=hf["max_position_embeddings"])
    return RopeParameters.from_hf(hf, head_dim)
