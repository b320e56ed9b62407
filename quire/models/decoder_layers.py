"""The blocks of a decoder layer; a family's DecoderConfig selects their variants."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.kernels.activation import SILU
from quire.kernels.add import add
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.rope_and_write import QKNormParams
from quire.kernels.skinny_table import MAX_FUSED_ROWS
from quire.layers.alibi import alibi_slopes
from quire.layers.attention import Attention
from quire.layers.encoder_attention import EncoderAttention
from quire.layers.linear import (
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    can_fuse,
    can_fuse_terms,
)
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.layers.norm import LayerNorm, Norm, RMSNorm, SharedRMSNorm
from quire.models.bypass import is_plain
from quire.models.decoder_config import DecoderConfig
from quire.models.latent_attention import attention_block
from quire.models.options import ModelOptions
from quire.quantization.base import LinearMethod
from quire.quantization.encoder_linear import EncoderLinearMethod
from quire.quantization.mixed import fused_method


@dataclass(frozen=True)
class BuildContext:
    """What the layers of a model are built from: the checkpoint's config and the engine's options."""

    config: DecoderConfig
    options: ModelOptions

    def norm(self) -> RMSNorm | LayerNorm:
        c, device = self.config, self.options.device
        if c.norm == "layer":
            return LayerNorm(c.hidden_size, c.norm_eps, c.norm_bias, device)
        return RMSNorm(c.hidden_size, c.norm_eps, device)

    def method(self, layer: int, module: str, names: tuple[str, ...]) -> LinearMethod | None:
        """Of the layer fused of `names` in the checkpoint's `module`."""
        place = f"{self.config.names.layer.format(i=layer)}.{module}"
        method = fused_method([self.options.quantization.linear_method(f"{place}.{name}") for name in names])
        return EncoderLinearMethod() if method is None and not self.config.causal else method


class FeedForward(Protocol):
    """The feed-forward block of a layer: an MLP or experts."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward_fused(self, stream: torch.Tensor, norm: RMSNormParams) -> torch.Tensor:
        """stream + block(norm(stream)), for at most `max_fused_rows` rows."""
        ...

    @property
    def max_fused_rows(self) -> int:
        """Known once weights are loaded."""
        ...

    @property
    def fuses_terms(self) -> bool:
        """Whether `forward_fused` is for steps with adapters, too."""
        ...


class SelfAttention(nn.Module):
    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        c, names, options = build.config, build.config.names, build.options
        placed = (options.dtype, options.device, options.tp)
        qkv_method = build.method(layer, names.attention, names.qkv)
        o_method = build.method(layer, names.attention, (names.out,))
        self.head_dim = c.head_dim
        self.qkv_proj = QKVParallelLinear(
            c.hidden_size, c.head_dim, c.num_heads, c.num_kv_heads, c.qkv_bias, *placed, qkv_method
        )
        self.o_proj = RowParallelLinear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias, *placed, o_method)
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.qk_norm, self.qkv_clip = c.qk_norm, c.qkv_clip
        self.q_norm: RMSNorm | LayerNorm | SharedRMSNorm | None = None
        self.k_norm: RMSNorm | LayerNorm | SharedRMSNorm | None = None
        self.tp, first_head = options.tp, heads * options.tp.rank
        if c.qk_norm is not None:
            first_kv_head, _ = options.tp.share_of_kv_heads(c.num_kv_heads)
            self.q_norm = _head_norm(c, heads, (c.num_heads, first_head), options)
            self.k_norm = _head_norm(c, kv_heads, (c.num_kv_heads, first_kv_head), options)
        self.sinks_slot: LoadSlot | None = None
        if c.sinks:
            sinks = new_parameter(heads, dtype=torch.float32, device=options.device)
            self.sinks_slot = LoadSlot(sinks.data, (c.num_heads,), 0, first_head, "zeros")
        slopes = None
        if c.alibi:
            slopes = (alibi_slopes(c.num_heads) * c.alibi)[first_head : first_head + heads].to(options.device)
        scale = c.attention_scale if c.attention_scale is not None else c.head_dim**-0.5
        if not c.causal:
            self.attn: Attention | EncoderAttention = EncoderAttention(
                heads, kv_heads, c.head_dim, scale, c.windows[layer]
            )
            return
        self.attn = Attention(
            layer,
            heads,
            kv_heads,
            c.head_dim,
            scale,
            c.windows[layer],
            softcap=c.attention_softcap,
            slopes=slopes,
            sinks=sinks if c.sinks else None,
        )

    def forward(self, x: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        return self.o_proj(self.attended(x, angles, ctx))

    def attended(self, x: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        """What the output projection takes."""
        return self.attn(self._qkv(x), ctx, angles, self.qk_norm_params())

    def write(self, x: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        """Keys and values to the cache; the queries, for `attend`."""
        assert isinstance(self.attn, Attention)
        return self.attn.write(self._qkv(x), ctx, angles, self.qk_norm_params())

    def attend(self, q: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(self.attn, Attention)
        return self.o_proj(self.attn.attend(q, ctx))

    def write_fused(
        self, stream: torch.Tensor, norm: RMSNormParams, angles: Angles | None, ctx: ForwardContext
    ) -> torch.Tensor:
        """`write` of norm(stream), if it `fuses`."""
        assert isinstance(self.attn, Attention)
        return self.attn.write(self.qkv_proj.fused(stream, norm=norm), ctx, angles, self.qk_norm_params())

    def attend_fused(self, q: torch.Tensor, stream: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """stream + attention, if it `fuses`."""
        assert isinstance(self.attn, Attention)
        return self.o_proj.fused(self.attn.attend(q, ctx), residual=stream)

    def _qkv(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        if self.qk_norm in ("width", "layer"):
            qkv = self._norm_qk(qkv)
        if self.qkv_clip is not None:
            qkv = qkv.clamp(-self.qkv_clip, self.qkv_clip)
        return qkv

    def forward_fused(
        self, stream: torch.Tensor, norm: RMSNormParams, angles: Angles | None, ctx: ForwardContext
    ) -> torch.Tensor:
        """stream + attention(norm(stream)), if it `fuses`."""
        qkv = self.qkv_proj.fused(stream, norm=norm)
        return self.o_proj.fused(self.attn(qkv, ctx, angles, self.qk_norm_params()), residual=stream)

    @property
    def fuses(self) -> bool:
        """Known once weights are loaded."""
        return can_fuse(self.qkv_proj, self.o_proj)

    @property
    def fuses_terms(self) -> bool:
        return can_fuse_terms(self.qkv_proj, self.o_proj)

    @property
    def writes_apart(self) -> bool:
        """Whether `write` and `attend` do what a call does."""
        return is_plain(self, SelfAttention, "attended") and is_plain(self.attn, Attention)

    def qk_norm_params(self) -> QKNormParams | None:
        """Those that the rotary kernel applies."""
        if self.qk_norm != "head":
            return None
        assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def _norm_qk(self, qkv: torch.Tensor) -> torch.Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = qkv.split(sizes, dim=-1)
        if self.qk_norm == "layer":
            q, k = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        if isinstance(self.q_norm, SharedRMSNorm) and isinstance(self.k_norm, SharedRMSNorm):
            # Means of equally many elements: the mean over ranks is that of all. Repeated KV heads count equally often.
            means = torch.cat((self.q_norm.squares(q), self.k_norm.squares(k)), dim=1)
            means = self.tp.all_reduce(means) / self.tp.size
            q, k = self.q_norm.scaled(q, means[:, :1]), self.k_norm.scaled(k, means[:, 1:])
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat((q.flatten(1), k.flatten(1), v), dim=-1)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {} if self.sinks_slot is None else {("sinks", None): self.sinks_slot}


def _head_norm(
    config: DecoderConfig, num_heads: int, all_heads: tuple[int, int], options: ModelOptions
) -> RMSNorm | LayerNorm | SharedRMSNorm:
    """Of a rank's heads; `all_heads`: how many all ranks have, and which is its first."""
    size, eps, device = config.head_dim, config.norm_eps, options.device
    if config.qk_norm == "layer":
        return LayerNorm((num_heads, size), eps, False, device, all_heads)
    if config.qk_norm == "head":
        return RMSNorm(size, eps, device)
    if options.tp.size == 1:
        return RMSNorm(size * num_heads, eps, device)
    return SharedRMSNorm(size * num_heads, size * all_heads[0], size * all_heads[1], eps, device)


class MLP(nn.Module):
    def __init__(self, build: BuildContext, layer: int, intermediate_size: int | None = None, module: str = "") -> None:
        """`module`: its name in the checkpoint's layer; default: the family's."""
        super().__init__()
        c, names = build.config, build.config.names
        inner = intermediate_size or c.intermediate_size
        placed = (build.options.dtype, build.options.device, build.options.tp)
        up_method = build.method(layer, module or names.mlp, names.up)
        down_method = build.method(layer, module or names.mlp, (names.down,))
        self.activation, self.gated = c.activation, c.gated
        sizes = [inner, inner] if c.gated else [inner]
        up_bias = c.mlp_bias if c.up_bias is None else c.up_bias
        self.up_proj = MergedColumnParallelLinear(c.hidden_size, sizes, up_bias, *placed, up_method)
        self.down_proj = RowParallelLinear(inner, c.hidden_size, c.mlp_bias, *placed, down_method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activated(x))

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """What the down projection takes."""
        if self.gated:
            return self.up_proj.gated(x, self.activation)
        return self.up_proj.activated(x, self.activation)

    def forward_fused(self, stream: torch.Tensor, norm: RMSNormParams) -> torch.Tensor:
        return self.down_proj.fused(self.up_proj.fused(stream, norm=norm, silu=True), residual=stream)

    @property
    def max_fused_rows(self) -> int:
        fuses = self.gated and self.activation == SILU and can_fuse(self.up_proj, self.down_proj)
        return MAX_FUSED_ROWS if fuses else 0

    @property
    def fuses_terms(self) -> bool:
        return can_fuse_terms(self.up_proj, self.down_proj)


class DecoderLayer(nn.Module):
    def __init__(self, build: BuildContext, layer: int, mlp: FeedForward) -> None:
        super().__init__()
        c = build.config
        self.parallel, self.residual_scale = c.parallel, c.residual_scale
        self.fusable = c.is_like_llama
        self.attention_norm = build.norm() if c.pre_norm else None
        self.self_attn = SelfAttention(build, layer) if c.latent is None else attention_block(build, layer)
        self.attention_out_norm = build.norm() if c.post_norm else None
        self.mlp_norm = build.norm() if c.pre_norm and c.mlp_norm else None
        self.mlp = mlp
        self.mlp_out_norm = build.norm() if c.post_norm else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: output of the previous layer, not yet added to `residual` (None in the first layer)."""
        if self.parallel:
            return self._forward_parallel(x, residual, angles, ctx)
        x, residual = _block_input(self.attention_norm, x, residual)
        return self._after_attention(self.self_attn(x, angles, ctx), residual)

    def _after_attention(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = _block_input(self.mlp_norm, self._block_output(x, self.attention_out_norm), residual)
        return self._block_output(self.mlp(x), self.mlp_out_norm), residual

    def write(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer up to what is in the cache: queries and stream, which `attend` takes of all or some tokens."""
        x, residual = _block_input(self.attention_norm, x, residual)
        return self.self_attn.write(x, angles, ctx), residual

    def attend(self, q: torch.Tensor, residual: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        return self._after_attention(self.self_attn.attend(q, ctx), residual)

    def write_fused(
        self, stream: torch.Tensor, angles: Angles | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`write` in fewer kernel launches, for at most `max_fused_rows` rows, as `attend_fused` is for `attend`."""
        assert isinstance(self.attention_norm, RMSNorm)
        return self.self_attn.write_fused(stream, self.attention_norm.params, angles, ctx), stream

    def attend_fused(self, q: torch.Tensor, stream: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(self.mlp_norm, RMSNorm)
        return self.mlp.forward_fused(self.self_attn.attend_fused(q, stream, ctx), self.mlp_norm.params)

    @property
    def writes_apart(self) -> bool:
        """Whether `write` and `attend` do what a call does."""
        return is_plain(self, DecoderLayer) and not self.parallel and getattr(self.self_attn, "writes_apart", False)

    def _forward_parallel(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, stream = _block_input(self.attention_norm, x, residual)
        for_mlp = x if self.mlp_norm is None else self.mlp_norm(stream)
        return self._block_output(add(self.self_attn(x, angles, ctx), self.mlp(for_mlp)), None), stream

    def forward_fused(self, stream: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        """Residual stream in and out, in fewer kernel launches, for few rows on a GPU."""
        attention_norm, mlp_norm = self.attention_norm, self.mlp_norm
        assert isinstance(attention_norm, RMSNorm) and isinstance(mlp_norm, RMSNorm)
        stream = self.self_attn.forward_fused(stream, attention_norm.params, angles, ctx)
        return self.mlp.forward_fused(stream, mlp_norm.params)

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind differ only in weights, so they run the same kernels."""
        methods = tuple(module.method for module in self.modules() if isinstance(module, ParallelLinear))
        return self.self_attn.attn.kind, type(self.mlp), methods

    @property
    def max_fused_rows(self) -> int:
        """Limit of rows for forward_fused(); known once weights are loaded."""
        fuses = self.fusable and self.self_attn.fuses
        return min(MAX_FUSED_ROWS, self.mlp.max_fused_rows) if fuses else 0

    @property
    def fuses_terms(self) -> bool:
        return self.self_attn.fuses_terms and self.mlp.fuses_terms

    def _block_output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            x = norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _block_input(
    norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input of a block, and the residual stream so far."""
    if norm is not None and residual is not None:
        return norm.add(x, residual)
    stream = x if residual is None else x + residual
    return (stream if norm is None else norm(stream)), stream
