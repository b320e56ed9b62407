"""The attention layer of models that see a text from both sides. It has no part in the KV cache."""

from functools import cached_property

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.kernels.encoder_attention import EncoderFeatures, encoder_attention, token_spans
from quire.kernels.paged_attention import AttentionShape
from quire.kernels.rope_and_write import QKNormParams


class EncoderAttention(nn.Module):
    """Called as `Attention` is. Every text is computed whole, in one step."""

    bias: torch.Tensor | None

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_size: int, scale: float, window: int | None = None
    ) -> None:
        super().__init__()
        self.shape = AttentionShape(num_heads, num_kv_heads, head_size)
        self.scale, self.window = float(scale), window
        self.register_buffer("bias", None, persistent=False)

    @property
    def kind(self) -> tuple[object, ...]:
        """As Attention.kind."""
        return self.shape, self.window, self.bias is not None

    @cached_property
    def features(self) -> EncoderFeatures:
        """Fixed at the first step: a family that has a bias sets it when weights are loaded."""
        return EncoderFeatures(self.shape, self.scale, self.window, self.bias)

    def forward(
        self, qkv: torch.Tensor, ctx: ForwardContext, angles: Angles | None = None, qk_norm: QKNormParams | None = None
    ) -> torch.Tensor:
        """qkv [N, (heads + 2 * kv_heads) * D] -> [N, heads * D]."""
        step = ctx.step
        if qkv.is_cuda and step.spans is None:
            step.spans = token_spans(step.query_start, qkv.shape[0])
        table, positions = (angles.table, angles.positions) if angles is not None else (None, None)
        return encoder_attention(qkv, step.query_start, self.features, qk_norm, table, positions, step.spans)
