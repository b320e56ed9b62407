"""Mixtral."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS
from quire.models.decoder_config import DecoderConfig
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.moe import EXPERTS, Experts, MoEModel

BLOCK = "model.layers.{i}.block_sparse_moe"


MIXTRAL_EXPERTS = (
    Rule(f"{BLOCK}.gate.weight", "layers.{i}.mlp.router.weight"),
    Rule(f"{BLOCK}.experts.{{e}}.w1.{{p}}", "layers.{i}.mlp.experts.gate_up.{e}.{p}", 0),
    Rule(f"{BLOCK}.experts.{{e}}.w3.{{p}}", "layers.{i}.mlp.experts.gate_up.{e}.{p}", 1),
    Rule(f"{BLOCK}.experts.{{e}}.w2.{{p}}", "layers.{i}.mlp.experts.down.{e}.{p}"),
)


class MixtralForCausalLM(MoEModel):
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*MIXTRAL_EXPERTS, *EXPERTS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        hf = {"rope_theta": 1e6, "rms_norm_eps": 1e-5} | hf
        return DecoderConfig.from_hf(hf, windows=(hf.get("sliding_window"),) * hf["num_hidden_layers"])

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        return Experts.from_hf(hf, module="block_sparse_moe", names=("w1", "w3", "w2"))
