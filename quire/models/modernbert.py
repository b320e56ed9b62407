"""ModernBERT."""

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.bert import CLASSIFIER
from quire.models.decoder_config import (
    FULL,
    SLIDING,
    ModuleNames,
    renamed,
    require,
    ropes_by_layer_type,
    windows_of_types,
)
from quire.models.encoder import EncoderModel
from quire.models.encoder_config import EncoderConfig, HeadConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap

LAYER, OURS = "model.layers.{i}", "layers.{i}"
NAMES = ModuleNames(LAYER, "attn", ("Wqkv",), "Wo", "mlp", ("Wi",), "Wo")
DEFAULTS = {
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "max_position_embeddings": 8192,
}
HEAD = Rule("head.dense.{p}", "head.dense.{p}"), Rule("head.norm.{p}", "head.norm.{p}"), CLASSIFIER


class ModernBertModel(EncoderModel):
    """Norms before blocks, rotary embeddings, a gated MLP; two of three layers have a window."""

    heads: ClassVar[dict[Task, HeadConfig]] = {
        "sequence": HeadConfig("CLS", dense=True, norm=True),
        "token": HeadConfig("ALL", dense=True, norm=True),
    }
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {"sequence": HEAD, "token": HEAD}
    weights: ClassVar[WeightMap] = WeightMap(
        (
            Rule("model.embeddings.tok_embeddings.weight", "embed_tokens.weight"),
            Rule("model.embeddings.norm.{p}", "embedding_norm.{p}"),
            Rule(f"{LAYER}.attn_norm.{{p}}", f"{OURS}.attention_norm.{{p}}"),
            Rule(f"{LAYER}.attn.Wqkv.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", ("q", "k", "v")),
            Rule(f"{LAYER}.attn.Wo.{{p}}", f"{OURS}.self_attn.o_proj.{{p}}"),
            Rule(f"{LAYER}.mlp_norm.{{p}}", f"{OURS}.mlp_norm.{{p}}"),
            Rule(f"{LAYER}.mlp.Wi.{{p}}", f"{OURS}.mlp.up_proj.{{p}}", (0, 1)),
            Rule(f"{LAYER}.mlp.Wo.{{p}}", f"{OURS}.mlp.down_proj.{{p}}"),
            Rule("model.final_norm.{p}", "norm.{p}"),
        )
    ).also_without("model.")

    def family_weights(self) -> WeightMap:
        weights = super().family_weights()
        return weights.ignoring("head.dense.{p}", "head.norm.{p}", "decoder.{p}") if self.task is None else weights

    def head_config(self, task: Task) -> HeadConfig:
        head, hf = super().head_config(task), self.hf
        pooling = str(hf.get("classifier_pooling") or "cls").upper() if task == "sequence" else head.pooling
        activation = hf.get("classifier_activation") or "gelu"
        return replace(head, pooling=pooling, activation=activation, dense_bias=bool(hf.get("classifier_bias", False)))

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        require(hf, "hidden_size", "num_attention_heads", "num_hidden_layers")
        hf = renamed(DEFAULTS | hf, hidden_act="hidden_activation", rms_norm_eps="norm_eps")
        every = hf["global_attn_every_n_layers"]
        types = hf.get("layer_types") or [SLIDING if i % every else FULL for i in range(hf["num_hidden_layers"])]
        bases = {FULL: hf.get("global_rope_theta") or 160_000.0, SLIDING: hf.get("local_rope_theta") or 10_000.0}
        bias = bool(hf.get("attention_bias", False))
        config = EncoderConfig.from_hf(
            hf,
            # Half of it on either side, and the token itself.
            windows=windows_of_types(types, hf["local_attention"] // 2 + 1),
            ropes=ropes_by_layer_type(hf, types, hf["hidden_size"] // hf["num_attention_heads"], bases),
            names=NAMES,
            norm_bias=bool(hf.get("norm_bias", False)),
            pre_norm=True,
            sum_norm=False,
            first_norm=False,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )
        assert isinstance(config, EncoderConfig)
        return config
