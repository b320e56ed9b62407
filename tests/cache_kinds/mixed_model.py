"""A model whose layers differ in kind of cache, heads and head size, and its reference without a cache."""

import copy
from dataclasses import replace

import torch
from torch import nn

from quire.attention.base import ForwardContext
from quire.kernels.paged_attention import AttentionShape
from quire.kernels.rope_and_write import norm_and_rope
from quire.layers.attention import Attention
from quire.models.decoder import HasProcessAfterLoading
from quire.models.decoder_layers import BuildContext, SelfAttention
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry
from tests.cache_kinds.latent import DenseLatents, LatentLayer
from tests.cache_kinds.recurrent import DenseScan, StateLayer

ARCHITECTURE = "MixedCachesForCausalLM"
BIDIRECTIONAL = "BidirectionalForCausalLM"
RANK, ROPE, WINDOW = 20, 16, 24
# Heads, KV heads, head size and window of attention layers.
LAYERS = ((4, 2, 16, None), "latent", (6, 3, 24, None), "state", (2, 1, 16, WINDOW), (4, 2, 16, None), "latent")


class LatentAttention(nn.Module):
    def __init__(self, build, layer, heads=3):
        super().__init__()
        options, width, hidden = build.options, RANK + ROPE, build.config.hidden_size
        placed = {"bias": False, "dtype": options.dtype, "device": options.device}
        self.heads = heads
        self.q_proj, self.kv_proj = nn.Linear(hidden, heads * width, **placed), nn.Linear(hidden, width, **placed)
        self.o_proj = nn.Linear(heads * RANK, hidden, **placed)
        self.attn = LatentLayer(layer, AttentionShape(heads, 1, width), RANK)

    def forward(self, x, angles, ctx):
        q = rotate_last(self.q_proj(x).unflatten(1, (self.heads, -1)), angles)
        latents = rotate_last(self.kv_proj(x)[:, None], angles)[:, 0]
        return self.o_proj(self.attn(q, latents, ctx).flatten(1))


def rotate_last(x, angles):
    """Rotary embedding of the last ROPE items of [N, H, width]."""
    cos, sin = angles.cos_sin
    cos, sin = (value.reshape(len(x), 1, -1)[..., : ROPE // 2] for value in (cos, sin))
    left, right = x[..., -ROPE:].chunk(2, dim=-1)
    return torch.cat((x[..., :-ROPE], left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Recurrence(nn.Module):
    def __init__(self, build, layer, width=40):
        super().__init__()
        options, hidden = build.options, build.config.hidden_size
        placed = {"bias": False, "dtype": options.dtype, "device": options.device}
        self.gate_proj, self.in_proj = nn.Linear(hidden, width, **placed), nn.Linear(hidden, width, **placed)
        self.o_proj = nn.Linear(width, hidden, **placed)
        self.attn = StateLayer(layer, AttentionShape(1, 1, width))

    def forward(self, x, angles, ctx):
        # In float32, as the state is.
        gate, new = torch.sigmoid(self.gate_proj(x).float() + 2), self.in_proj(x).float()
        return self.o_proj(torch.tanh(self.attn(gate, new, ctx)).to(x.dtype))


class MixedCaches(LlamaForCausalLM):
    def __init__(self, hf, options):
        super().__init__(hf, options)
        build = BuildContext(self.config, options)
        for i, (layer, kind) in enumerate(zip(self.layers, LAYERS, strict=True)):
            layer.self_attn = self.make_attention(build, i, kind)

    def make_attention(self, build, layer, kind):
        if kind == "latent":
            return LatentAttention(build, layer)
        if kind == "state":
            return Recurrence(build, layer)
        heads, kv_heads, head_size, window = kind
        config = replace(build.config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_size,
                         windows=(window,) * len(LAYERS))  # fmt: skip
        return SelfAttention(BuildContext(config, build.options), layer)

    def process_after_loading(self):
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                values = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                parameter.data.copy_(values)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        for module in self.modules():
            if module is not self and isinstance(module, HasProcessAfterLoading):
                module.process_after_loading()


class Bidirectional(MixedCaches):
    """Every token sees all tokens of its prompt."""

    def make_attention(self, build, layer, kind):
        attention = super().make_attention(build, layer, (4, 2, 16, None))
        attention.attn.causal = False
        return attention


ModelRegistry.register_model(ARCHITECTURE, MixedCaches)
ModelRegistry.register_model(BIDIRECTIONAL, Bidirectional)


class DenseAttention(nn.Module):
    """The reference of Attention, for one sequence without a cache."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, qkv, ctx, angles, qk_norm):
        layer, length = self.layer, len(qkv)
        q, k, v = norm_and_rope(qkv, layer.num_heads, layer.num_kv_heads, qk_norm, angles.cos_sin)
        k, v = (x.repeat_interleave(layer.shape.group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        query, key = torch.arange(length, device=q.device)[:, None], torch.arange(length, device=q.device)
        masked = (key > query) & layer.causal
        if layer.sliding_window is not None:
            masked = masked | (key <= query - layer.sliding_window)
        weights = scores.masked_fill(masked, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


NO_CONTEXT = ForwardContext(None, [], [])  # dense layers need none
DENSE = {Attention: DenseAttention, LatentLayer: DenseLatents, StateLayer: DenseScan}


@torch.inference_mode()
def dense_logprobs(model, sequences):
    """Of every next token of each sequence: [length, vocab]."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.self_attn.attn = DENSE[type(layer.self_attn.attn)](layer.self_attn.attn)
    results = []
    for ids in sequences:
        tokens = torch.tensor(ids, device=next(model.parameters()).device)
        hidden = model(tokens, torch.arange(len(ids), device=tokens.device), NO_CONTEXT)
        results.append(model.compute_logits(hidden).float().log_softmax(-1).cpu())
    return results
