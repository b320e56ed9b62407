"""EAGLE heads: a decoder layer or a few that continue the target's hidden states, and their checkpoints."""

from collections.abc import Sequence
from typing import Any

import torch

from quire.attention.base import ForwardContext
from quire.config.shown import shown
from quire.config.values import whole_number
from quire.kernels.add import add
from quire.layers.linear import ParallelLinear, QKVParallelLinear
from quire.layers.norm import Norm
from quire.models.base import FINAL
from quire.models.decoder import DECODER_WEIGHTS, DecoderModel
from quire.models.decoder_config import DecoderConfig
from quire.models.decoder_layers import BuildContext, DecoderLayer, SelfAttention
from quire.models.draft_head import DraftHead
from quire.models.llama import LlamaForCausalLM
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.options import ModelOptions


class Eagle1Head(DraftHead):
    """fc joins embedding and hidden state; the first layer does not norm its input, and there is no norm at the end."""

    def __init__(self, hf: dict[str, Any], options: ModelOptions, target: DecoderModel, names: Sequence[str]) -> None:
        if hf.get("add_para_norm") or hf.get("layernorms"):
            raise ValueError("EAGLE heads with norms of embedding and hidden state (HASS) are not supported")
        if hf.get("hidden_size") != target.hidden_size:
            raise ValueError(
                f"the head's hidden_size is {shown(hf.get('hidden_size'))}; of an EAGLE-1 head it must be the "
                f"target's, {target.hidden_size}"
            )
        draft_vocab = hf.get("vocab_size") if _has(names, "lm_head.weight") else None
        super().__init__(
            head_config(hf, options.max_model_len),
            options,
            target,
            _has(names, "embed_tokens.weight"),
            draft_vocab,
            2 * target.hidden_size,
            _has(names, "fc.bias", "fusion_fc.bias"),
        )
        assert isinstance(self.layers[0], DecoderLayer)
        self.layers[0].attention_norm = None

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.apply_pair(embeds, hidden)
        out = add(*self._run_layers(x, None, 0, self.rotary(positions), ctx))
        return out, out


class Eagle3Head(DraftHead):
    """fc joins hidden states of several of the target's layers; the first layer attends from embedding and hidden
    state side by side, each with its norm. It has an LM head of its own, usually of fewer tokens."""

    def __init__(self, hf: dict[str, Any], options: ModelOptions, target: DecoderModel, names: Sequence[str]) -> None:
        layers = aux_layers(hf, target.config.num_layers)
        own_head = _has(names, "lm_head.weight") or not names
        draft_vocab = whole_number("draft_vocab_size", hf.get("draft_vocab_size") or hf.get("vocab_size"))
        super().__init__(
            head_config(hf, options.max_model_len),
            options,
            target,
            _has(names, "embed_tokens.weight"),
            draft_vocab if own_head else None,
            len(layers) * target.hidden_size,
        )
        self.hidden_outputs = layers or (FINAL,)
        c, build = self.config, BuildContext(self.config, options)
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        first.self_attn.qkv_proj = QKVParallelLinear(
            2 * c.hidden_size,
            c.head_dim,
            c.num_heads,
            c.num_kv_heads,
            c.qkv_bias,
            options.dtype,
            options.device,
            options.tp,
        )
        self.hidden_norm = build.norm()
        self.norm = build.norm()
        self.norm_before_residual = bool(hf.get("norm_before_residual", False))

    def pair_linear(self) -> ParallelLinear:
        first = self.layers[0]
        assert isinstance(first, DecoderLayer) and isinstance(first.self_attn, SelfAttention)
        return first.self_attn.qkv_proj

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.fc is None else self.fc(hidden)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, angles = self.layers[0], self.rotary(positions)
        assert isinstance(first, DecoderLayer) and first.attention_norm is not None and first.mlp_norm is not None
        normed = self.hidden_norm(hidden)
        attention = first.self_attn
        assert isinstance(attention, SelfAttention)
        qkv = self.apply_pair(first.attention_norm(embeds), normed)
        x = attention.o_proj(attention.attn(qkv, ctx, angles, attention.qk_norm_params()))
        residual = normed if self.norm_before_residual else hidden  # the sum is written over it
        mlp_norm: Norm = first.mlp_norm
        x, residual = mlp_norm.add(x, residual)
        x, residual = self._run_layers(first.mlp(x), residual, 1, angles, ctx)
        carried = add(x, residual)
        return self.norm(carried), carried


def aux_layers(hf: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of the target whose inputs an EAGLE-3 head reads; () if it reads the final hidden states."""
    nested = hf.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config is {shown(nested)}; it must be an object")
    if not nested.get("use_aux_hidden_state", True):
        return ()
    name = "eagle_aux_hidden_state_layer_ids"
    given = hf.get(name) or nested.get(name) or [2, num_layers // 2, num_layers - 3]
    if not isinstance(given, list) or not all(type(i) is int and 1 <= i <= num_layers for i in given):
        raise ValueError(
            f"{name} is {shown(given)}; it must be a list of layers from 1 to the target's {num_layers}, which is what "
            "leaves its last"
        )
    return tuple(given)


def head_config(hf: dict[str, Any], max_model_len: int | None) -> DecoderConfig:
    """Of a layer like Llama's. A head may have been trained on shorter texts than it is used for."""
    name = "max_position_embeddings"
    length = max(whole_number(name, hf.get(name) or 0, 0), max_model_len or 0)
    if length:
        hf = hf | {name: length}
    return LlamaForCausalLM.read_config({"intermediate_size": 1, "num_hidden_layers": 1} | hf).limited_to(max_model_len)


def flattened(hf: dict[str, Any]) -> dict[str, Any]:
    """A config of the speculators library, whose layers' sizes are nested, in the keys of other checkpoints."""
    layers = hf.get("transformer_layer_config")
    if not isinstance(layers, dict):
        return hf
    outer = {name: value for name, value in hf.items() if name != "transformer_layer_config" and value is not None}
    flat = layers | outer
    flat.setdefault("num_hidden_layers", 1)
    return flat


def head_names(checkpoint_layers: Sequence[str] = ("midlayer", "transformer")) -> WeightMap:
    """Names of the authors' checkpoints, of the speculators library's, and of those that have either below `model`."""
    layers = [rule for rule in DECODER_WEIGHTS.rules if "{i}" in rule.checkpoint]
    rules = [
        Rule(
            rule.checkpoint.replace("model.layers.{i}", place),
            rule.parameter.replace("{i}", "0"),
            rule.shard,
        )
        for place in checkpoint_layers
        for rule in layers
    ]
    rules += [
        Rule("layers.0.hidden_norm.weight", "hidden_norm.weight"),
        *(Rule(f"{place}.hidden_norm.weight", "hidden_norm.weight") for place in checkpoint_layers),
        Rule("fc.{p}", "fc.{p}"),
        Rule("fusion_fc.{p}", "fc.{p}"),
        *DECODER_WEIGHTS.also_without("model.").rules,
    ]
    bare = [rule for rule in rules if not rule.checkpoint.startswith("model.")]
    prefixed = [Rule(f"model.{rule.checkpoint}", rule.parameter, rule.shard) for rule in bare]
    return WeightMap((*rules, *prefixed), ("d2t", "t2d", *DECODER_WEIGHTS.ignored))


def _has(names: Sequence[str], *wanted: str) -> bool:
    return any(name.removeprefix("model.") in wanted for name in names)
