"""Granite with experts."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS
from quire.models.decoder_config import DecoderConfig
from quire.models.granite import GraniteForCausalLM
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.moe import EXPERTS, Experts, MoEModel

BLOCK = "model.layers.{i}.block_sparse_moe"


class GraniteMoeForCausalLM(MoEModel):
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        Rule(f"{BLOCK}.router.layer.weight", "layers.{i}.mlp.router.weight"),
        Rule(f"{BLOCK}.input_linear.weight", "layers.{i}.mlp.experts.gate_up"),
        Rule(f"{BLOCK}.output_linear.weight", "layers.{i}.mlp.experts.down"),
        *EXPERTS,
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return GraniteForCausalLM.configure(hf)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        checkpoint = hf.get("experts_checkpoint", "fused")
        return Experts.from_hf(hf, routing={"scores": "topk_softmax"}, checkpoint=checkpoint, module="block_sparse_moe")
