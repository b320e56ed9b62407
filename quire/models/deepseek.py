"""DeepSeek-V2 and V3, and what is built like them: latent attention, and experts with shared ones beside them."""

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS
from quire.models.decoder_config import DecoderConfig, choice, require
from quire.models.draft_head import DraftHead
from quire.models.latent_attention import INDEX, LATENT_ATTENTION, latent_config, latent_weights
from quire.models.loading.weight_map import WeightMap
from quire.models.moe import BIASED_SIGMOID, CORRECTION_BIAS, EXPERTS, SHARED_EXPERTS, Experts, MoEModel
from quire.models.mtp import MTPHead, ignoring_mtp, mtp_weights
from quire.models.options import ModelOptions


class DeepseekV2ForCausalLM(MoEModel):
    """V2 and V2-Lite: softmax over all experts; the larger one chooses among groups of them."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*LATENT_ATTENTION, *EXPERTS, *SHARED_EXPERTS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return latent_config(hf, interleaved=True)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        routing: dict[str, Any] = {"renormalize": bool(hf.get("norm_topk_prob", False))}
        method = choice(hf, "topk_method", "greedy", "group_limited_greedy")
        choice(hf, "scoring_func", "softmax")
        if method == "greedy":
            routing |= {"groups": 1, "top_groups": 1}
        return Experts.from_deepseek(hf, routing)

    def family_weights(self) -> WeightMap:
        return latent_weights(super().family_weights(), self.config.latent)

    def is_sparse(self, layer: int) -> bool:
        return super().is_sparse(layer) and layer % (self.hf.get("moe_layer_freq") or 1) == 0


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """V3, R1, V3.1, Kimi-K2, Moonlight: sigmoids, and a bias that corrects the choice. V3 and R1 have a layer behind
    the last that predicts the token after the next."""

    weights: ClassVar[WeightMap] = DeepseekV2ForCausalLM.weights.with_rules(CORRECTION_BIAS)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        choice(hf, "topk_method", "noaux_tc")
        choice(hf, "scoring_func", "sigmoid")
        routing = dict(BIASED_SIGMOID) | {"renormalize": bool(hf.get("norm_topk_prob", True))}
        return Experts.from_deepseek(hf, routing, correction_bias=True)

    def weight_map(self) -> WeightMap:
        return ignoring_mtp(super().weight_map(), self.mtp_weights())

    def make_mtp_head(self, options: ModelOptions) -> DraftHead:
        if self.hf.get("num_nextn_predict_layers", 1) == 0:
            raise ValueError("the model's checkpoint has no prediction layer (num_nextn_predict_layers is 0)")
        c, last = self.config, self.config.num_layers
        names = replace(c.names, layer=f"model.layers.{last}")
        config = replace(c, num_layers=1, windows=c.windows[-1:], ropes=c.ropes[-1:], names=names)
        options = replace(self.options, stage=options.stage)
        return MTPHead(config, options, self, lambda build, layer: self.make_mlp(build, last + layer))

    def mtp_weights(self) -> WeightMap:
        return mtp_weights(self.config.num_layers, self.weights.rules)


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """V3.2: an index selects the tokens that each query attends to."""

    weights: ClassVar[WeightMap] = DeepseekV3ForCausalLM.weights.with_rules(*INDEX)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        require(hf, "index_topk")
        return super().configure(hf)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return super().configure({"rms_norm_eps": 1e-5} | hf)

    def is_sparse(self, layer: int) -> bool:
        types = self.hf.get("mlp_layer_types")
        if types is None or layer >= len(types):  # one behind the last is a prediction layer
            return layer >= (self.hf.get("first_k_dense_replace", 1) or 0)
        return types[layer] == "sparse"


class GlmMoeDsaForCausalLM(Glm4MoeLiteForCausalLM):
    """GLM-5: DeepSeek-V3.2's index, which rotates neighbours."""

    weights: ClassVar[WeightMap] = Glm4MoeLiteForCausalLM.weights.with_rules(*INDEX)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        require(hf, "index_topk")
        pattern = hf.get("index_topk_pattern") or ""
        shared = "shared" in (hf.get("indexer_types") or ()) or "S" in pattern or "shared" in pattern
        if shared or (hf.get("index_topk_freq") or 1) > 1:
            raise ValueError(
                "layers that attend to the tokens which the index of a layer before has selected are not supported yet "
                "(indexer_types, index_topk_pattern, index_topk_freq)"
            )
        return super().configure({"indexer_rope_interleave": True} | hf)
