"""gpt-oss: experts with biases and clamped activations, attention sinks."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from quire.checkpoint.mxfp4 import pair_mxfp4
from quire.checkpoint.tensors import CheckpointTensor
from quire.layers.mxfp4_experts import Mxfp4Experts
from quire.models.decoder import DECODER_WEIGHTS
from quire.models.decoder_config import DecoderConfig, layer_types, windows_of_types
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.moe import EXPERTS as PER_EXPERT
from quire.models.moe import Experts, MoEModel


def gate_before_up(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2 * I, ...] with gate and up interleaved -> all gates, then all ups."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def outputs_first(weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(1, 2)


# Default of configs without rope parameters.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
BLOCK = "model.layers.{i}.mlp"
EXPERTS = f"{BLOCK}.experts"


class GptOssForCausalLM(MoEModel):
    """Attention with a sink in every head, windows on every second layer, and experts stored in mxfp4 (kept at 4 bits,
    or dequantized while loading) or unquantized."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        Rule("model.layers.{i}.self_attn.sinks", "layers.{i}.self_attn.sinks"),
        Rule(f"{BLOCK}.router.{{p}}", "layers.{i}.mlp.router.{p}"),
        Rule(
            f"{EXPERTS}.gate_up_proj",
            "layers.{i}.mlp.experts.gate_up",
            transform=lambda weight: gate_before_up(outputs_first(weight)),
        ),
        Rule(f"{EXPERTS}.gate_up_proj_mxfp4", "layers.{i}.mlp.experts.gate_up", transform=gate_before_up),
        Rule(f"{EXPERTS}.gate_up_proj_blocks", "layers.{i}.mlp.experts.gate_up_blocks", transform=gate_before_up),
        Rule(f"{EXPERTS}.gate_up_proj_scales", "layers.{i}.mlp.experts.gate_up_scales", transform=gate_before_up),
        Rule(f"{EXPERTS}.gate_up_proj_bias", "layers.{i}.mlp.experts.gate_up_bias", transform=gate_before_up),
        Rule(f"{EXPERTS}.down_proj", "layers.{i}.mlp.experts.down", transform=outputs_first),
        Rule(f"{EXPERTS}.down_proj_mxfp4", "layers.{i}.mlp.experts.down"),
        Rule(f"{EXPERTS}.down_proj_blocks", "layers.{i}.mlp.experts.down_blocks"),
        Rule(f"{EXPERTS}.down_proj_scales", "layers.{i}.mlp.experts.down_scales"),
        Rule(f"{EXPERTS}.down_proj_bias", "layers.{i}.mlp.experts.down_bias"),
        # GGUF's
        Rule("model.layers.{i}.self_attn.sinks.weight", "layers.{i}.self_attn.sinks"),
        *PER_EXPERT,
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
            hf = hf | {"rope_parameters": ROPE}
        hf = {"rms_norm_eps": 1e-5} | hf
        bias = bool(hf.get("attention_bias", True))
        return DecoderConfig.from_hf(
            hf,
            windows=windows_of_types(layer_types(hf, full_every=2), hf.get("sliding_window", 128)),
            head_dim=64,
            qkv_bias=bias,
            o_bias=bias,
            sinks=True,
        )

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        if (hf.get("swiglu_alpha", 1.702), hf.get("swiglu_limit", 7.0)) != (1.702, 7.0):
            raise ValueError("swiglu_alpha and swiglu_limit are supported as 1.702 and 7.0 only")
        checkpoint = hf.get("experts_checkpoint", "fused")
        return Experts.from_hf(
            hf, routing={"scores": "topk_softmax"}, activation="swigluoai", bias=True, checkpoint=checkpoint
        )

    def regroup_tensors(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        as_stored = any(isinstance(module, Mxfp4Experts) for module in self.modules())
        return tensors if as_stored else pair_mxfp4(tensors)
