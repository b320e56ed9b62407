"""BERT, RoBERTa and XLM-RoBERTa."""

from typing import Any, ClassVar

from quire.models.decoder_config import ModuleNames, renamed
from quire.models.encoder import EncoderModel, with_legacy_norms
from quire.models.encoder_config import EncoderConfig, HeadConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap

OURS = "layers.{i}"
NAMES = ModuleNames(
    "encoder.layer.{i}",
    attention="attention",
    qkv=("self.query", "self.key", "self.value"),
    out="output.dense",
    mlp="intermediate",
    up=("dense",),
    down="output.dense",
)
DEFAULTS = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2}


def bert_weights(
    prefix: str,
    *more: Rule,
    names: ModuleNames = NAMES,
    down: str = "output.dense",
    norms: tuple[str, str] = ("attention.output.LayerNorm", "output.LayerNorm"),
) -> WeightMap:
    """`prefix`: that of the encoder in checkpoints with a head, which others may lack. `down` and `norms`, behind
    attention and behind the MLP, are a layer's."""
    layer, embeddings = f"{prefix}{names.layer}", f"{prefix}embeddings"
    attention = f"{layer}.{names.attention}"
    rules = (
        *(
            Rule(f"{attention}.{name}.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", shard)
            for name, shard in zip(names.qkv, "qkv", strict=True)
        ),
        Rule(f"{attention}.{names.out}.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
        Rule(f"{layer}.{norms[0]}.{{p}}", f"{OURS}.attention_sum_norm.{{p}}"),
        Rule(f"{layer}.{names.mlp}.{names.up[0]}.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
        Rule(f"{layer}.{down}.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
        Rule(f"{layer}.{norms[1]}.{{p}}", f"{OURS}.mlp_sum_norm.{{p}}"),
        Rule(f"{embeddings}.word_embeddings.weight", "embed_tokens.weight"),
        Rule(f"{embeddings}.position_embeddings.weight", "embed_positions.weight"),
        Rule(f"{embeddings}.token_type_embeddings.weight", "embed_tokens.types"),
        Rule(f"{embeddings}.LayerNorm.{{p}}", "embedding_norm.{p}"),
        *more,
    )
    return with_legacy_norms(WeightMap(rules)).ignoring(f"{embeddings}.position_ids").also_without(prefix)


# What turns hidden states into tokens or pairs of sentences, and the pooler that some have without using it.
BERT_UNUSED = (
    "bert.pooler.dense.{p}",
    "pooler.dense.{p}",
    "cls.predictions.bias",
    "cls.predictions.decoder.{p}",
    "cls.predictions.transform.dense.{p}",
    "cls.predictions.transform.LayerNorm.{p}",
    "cls.seq_relationship.{p}",
)
ROBERTA_UNUSED = ("pooler.dense.{p}", *(f"lm_head.{name}{{p}}" for name in ("", "dense.", "layer_norm.", "decoder.")))
CLASSIFIER = Rule("classifier.{p}", "head.out.{p}")


class BertModel(EncoderModel):
    heads: ClassVar[dict[Task, HeadConfig]] = {"sequence": HeadConfig("CLS", dense=True), "token": HeadConfig("ALL")}
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {
        "sequence": (Rule("bert.pooler.dense.{p}", "head.dense.{p}"), CLASSIFIER),
        "token": (CLASSIFIER,),
    }
    weights: ClassVar[WeightMap] = bert_weights("bert.")

    def family_weights(self) -> WeightMap:
        pooled = self.task == "sequence"
        return super().family_weights().ignoring(*(name for name in BERT_UNUSED if not pooled or "pooler" not in name))

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        if hf.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError("only absolute position embeddings are supported (position_embedding_type)")
        hf = renamed(DEFAULTS | hf, rms_norm_eps="layer_norm_eps")
        return cls.encoder_config(hf, num_positions=hf["max_position_embeddings"])

    @classmethod
    def encoder_config(cls, hf: dict[str, Any], **differences: Any) -> EncoderConfig:
        """What BERT's relatives share: biases everywhere, an MLP without a gate, nothing rotated."""
        shared = {
            "ropes": (None,) * hf["num_hidden_layers"],
            "names": NAMES,
            "num_token_types": hf.get("type_vocab_size") or 0,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "gated": False,
        }
        config = EncoderConfig.from_hf(hf, **(shared | differences))
        assert isinstance(config, EncoderConfig)
        return config


class RobertaModel(BertModel):
    """BERT whose positions are counted from behind the padding token's number."""

    heads: ClassVar[dict[Task, HeadConfig]] = {"sequence": HeadConfig("CLS", dense=True), "token": HeadConfig("ALL")}
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {
        "sequence": (
            Rule("classifier.dense.{p}", "head.dense.{p}"),
            Rule("classifier.out_proj.{p}", "head.out.{p}"),
        ),
        "token": (CLASSIFIER,),
    }
    weights: ClassVar[WeightMap] = bert_weights("roberta.").ignoring("roberta.pooler.dense.{p}", *ROBERTA_UNUSED)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        if hf.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError("only absolute position embeddings are supported (position_embedding_type)")
        hf = renamed(DEFAULTS | hf, rms_norm_eps="layer_norm_eps")
        offset = (1 if hf.get("pad_token_id") is None else hf["pad_token_id"]) + 1
        positions = hf["max_position_embeddings"] - offset
        return cls.encoder_config(hf, num_positions=positions, position_offset=offset)
