"""DistilBERT."""

from typing import Any, ClassVar

from quire.models.bert import CLASSIFIER, BertModel, bert_weights
from quire.models.decoder_config import ModuleNames, renamed
from quire.models.encoder_config import EncoderConfig, HeadConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap

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
    weights: ClassVar[WeightMap] = bert_weights(
        "distilbert.", names=NAMES, down="ffn.lin2", norms=("sa_layer_norm", "output_layer_norm")
    ).ignoring("vocab_transform.{p}", "vocab_layer_norm.{p}", "vocab_projector.{p}")

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
