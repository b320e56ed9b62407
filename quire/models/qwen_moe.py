"""Qwen 2 and 3 with experts."""

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS
from quire.models.decoder_config import FULL, SLIDING, DecoderConfig, windows_of_types
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.moe import EXPERTS, Experts, MoEModel, shared_rules
from quire.models.qwen3 import Qwen3ForCausalLM

SHARED = (
    *shared_rules("mlp.shared_expert"),
    Rule("model.layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.weight"),
)


class QwenMoE(MoEModel):
    """Some layers may have a dense MLP."""

    def is_sparse(self, layer: int) -> bool:
        if layer in (self.hf.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % (self.hf.get("decoder_sparse_step") or 1) == 0

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        shared = hf.get("shared_expert_intermediate_size") or 0
        return Experts.from_hf(
            hf,
            "moe_intermediate_size",
            {"renormalize": bool(hf.get("norm_topk_prob", False))},
            shared_size=shared,
            shared_gate=shared > 0,
            shared_module="mlp.shared_expert",
        )


class Qwen2MoeForCausalLM(QwenMoE):
    """With a shared expert beside the routed ones."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*EXPERTS, *SHARED)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        window = _window(hf)
        first = hf.get("max_window_layers", 28) if window else 0
        kinds = [SLIDING if i % 2 == 0 and i < first else FULL for i in range(hf["num_hidden_layers"])]
        windows = windows_of_types(hf.get("layer_types") or kinds, window)
        return DecoderConfig.from_hf(hf, windows=windows, qkv_bias=bool(hf.get("qkv_bias", True)))


class Qwen3MoeForCausalLM(QwenMoE):
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*EXPERTS, *QK_NORMS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        windows = (_window(hf),) * hf["num_hidden_layers"]
        return replace(Qwen3ForCausalLM.configure(hf | {"use_sliding_window": False}), windows=windows)


def _window(hf: dict[str, Any]) -> int | None:
    return hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
