"""DistilBERT."""

from typing import Any, ClassVar

from quire.models.bert import CLASSIFIER, OURS, BertModel
from quire.models.decoder_config import ModuleNames, renamed
from quire.models.encoder import with_legacy_norms
from quire.models.encoder_config import EncoderConfig, HeadConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap

PREFIX = "distilbert."
LAYER = PREFIX + "transformer.layer.{i}"
NAMES = ModuleNames(
    "transformer.layer.{i}", "attention", ("q_lin", "k_lin", "v_lin"), "out_lin", "ffn", ("lin1",), "lin2"
)


class DistilBertModel(BertModel):
    """BERT without token types."""

    heads: ClassVar[dict[Task, HeadConfig]] = {
        "sequence": HeadConfig("CLS", dense=True, activation="relu"),
        "token": HeadConfig("ALL"),
    }
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {
        "sequence": (Rule("pre_classifier.{p}", "head.dense.{p}"), CLASSIFIER),
        "token": (CLASSIFIER,),
    }
    weights: ClassVar[WeightMap] = (
        with_legacy_norms(
            WeightMap(
                (
                    *(
                        Rule(f"{LAYER}.attention.{name}_lin.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", name)
                        for name in "qkv"
                    ),
                    Rule(f"{LAYER}.attention.out_lin.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
                    Rule(f"{LAYER}.sa_layer_norm.{{p}}", f"{OURS}.attention_sum_norm.{{p}}"),
                    Rule(f"{LAYER}.ffn.lin1.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", 0),
                    Rule(f"{LAYER}.ffn.lin2.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
                    Rule(f"{LAYER}.output_layer_norm.{{p}}", f"{OURS}.mlp_sum_norm.{{p}}"),
                    Rule(f"{PREFIX}embeddings.word_embeddings.weight", "embed_tokens.weight"),
                    Rule(f"{PREFIX}embeddings.position_embeddings.weight", "embed_positions.weight"),
                    Rule(f"{PREFIX}embeddings.LayerNorm.{{p}}", "embedding_norm.{p}"),
                )
            )
        )
        .also_without(PREFIX)
        .ignoring("vocab_transform.{p}", "vocab_layer_norm.{p}", "vocab_projector.{p}")
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        hf = renamed(
            {"activation": "gelu", "max_position_embeddings": 512, "rms_norm_eps": 1e-12} | hf,
            hidden_size="dim",
            intermediate_size="hidden_dim",
            num_hidden_layers="n_layers",
            num_attention_heads="n_heads",
            hidden_act="activation",
        )
        return cls.encoder_config(hf, names=NAMES, num_positions=hf["max_position_embeddings"], num_token_types=0)
