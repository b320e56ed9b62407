"""The attention block of models with a latent cache (DeepSeek's MLA), and how configs and checkpoints describe it."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.attention.indexed import IndexInputs
from quire.config.values import finite_number, whole_number
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.latent_attention import IndexedLatentAttention, IndexSizes, LatentAttention, LatentSizes
from quire.layers.linear import (
    ColumnParallelLinear,
    QueryAndLatentLinear,
    RowParallelLinear,
    can_fuse,
    can_fuse_terms,
)
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rope_scaling import MAX_NUMBER, yarn_magnitude
from quire.layers.rotary import MAX_POSITIONS, RopeParameters
from quire.models.bypass import is_plain
from quire.models.config_checks import MAX_HEAD_DIM, MAX_HEADS
from quire.models.decoder_config import DecoderConfig, require
from quire.models.loading.weight_map import Rule, WeightMap

if TYPE_CHECKING:
    from quire.models.decoder_layers import BuildContext

EPS = 1e-6  # of the norms inside, whatever rms_norm_eps is: as in all published code

_THEIRS, _OURS = "model.layers.{i}.self_attn", "layers.{i}.self_attn"
LATENT_ATTENTION = (
    Rule(f"{_THEIRS}.q_proj.{{p}}", f"{_OURS}.in_proj.{{p}}", "q"),
    Rule(f"{_THEIRS}.q_a_proj.{{p}}", f"{_OURS}.in_proj.{{p}}", "q"),
    Rule(f"{_THEIRS}.kv_a_proj_with_mqa.{{p}}", f"{_OURS}.in_proj.{{p}}", "kv"),
    Rule(f"{_THEIRS}.q_a_layernorm.weight", f"{_OURS}.q_norm.weight"),
    Rule(f"{_THEIRS}.q_b_proj.{{p}}", f"{_OURS}.q_b_proj.{{p}}"),
    Rule(f"{_THEIRS}.kv_a_layernorm.weight", f"{_OURS}.kv_norm.weight"),
    Rule(f"{_THEIRS}.kv_b_proj.{{p}}", f"{_OURS}.kv_b_proj.{{p}}"),
)
INDEX = (
    Rule(f"{_THEIRS}.indexer.wq_b.{{p}}", f"{_OURS}.index_q.{{p}}"),
    Rule(f"{_THEIRS}.indexer.wk.{{p}}", f"{_OURS}.index_k.{{p}}"),
    Rule(f"{_THEIRS}.indexer.k_norm.{{p}}", f"{_OURS}.index_norm.{{p}}"),
    Rule(f"{_THEIRS}.indexer.weights_proj.{{p}}", f"{_OURS}.index_weights.{{p}}"),
)


def latent_weights(weights: WeightMap, sizes: LatentSizes | None) -> WeightMap:
    """Without the name that queries have only where they are compressed, or only where they are not."""
    assert sizes is not None
    other = f"{_THEIRS}.q_proj.{{p}}" if sizes.q_rank is not None else f"{_THEIRS}.q_a_proj.{{p}}"
    return WeightMap(tuple(rule for rule in weights.rules if rule.checkpoint != other), weights.ignored)


class LatentSelfAttention(nn.Module):
    """Queries and latents are one product. What makes keys and values of latents is part of attention itself, in the
    compute dtype: absorbed, it is multiplied head by head."""

    attention_class: ClassVar[type[LatentAttention]] = LatentAttention

    def __init__(self, build: "BuildContext", layer: int) -> None:
        super().__init__()
        c, options, module = build.config, build.options, build.config.names.attention
        placed = (options.dtype, options.device, options.tp)
        assert c.latent is not None
        self.sizes = s = c.latent
        heads = options.tp.share(c.num_heads, "attention heads")
        first = "q_proj" if s.q_rank is None else "q_a_proj"
        method = build.method(layer, module, (first, "kv_a_proj_with_mqa"))
        self.in_proj = QueryAndLatentLinear(
            c.hidden_size,
            s.q_rank or c.num_heads * s.query,
            s.latent,
            c.qkv_bias,
            *placed,
            method,
            compressed=s.q_rank is not None,
        )
        self.q_norm: RMSNorm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if s.q_rank is not None:
            self.q_norm = RMSNorm(s.q_rank, EPS, options.device)
            q_b = build.method(layer, module, ("q_b_proj",))
            self.q_b_proj = ColumnParallelLinear(s.q_rank, c.num_heads * s.query, False, *placed, q_b)
        self.kv_norm = RMSNorm(s.rank, EPS, options.device)
        kv_b = build.method(layer, module, ("kv_b_proj",))
        self.kv_b_proj: ColumnParallelLinear | None  # until weights are loaded
        self.kv_b_proj = ColumnParallelLinear(s.rank, c.num_heads * s.expanded, False, *placed, kv_b)
        out = build.method(layer, module, (c.names.out,))
        self.o_proj = RowParallelLinear(c.num_heads * s.v, c.hidden_size, c.o_bias, *placed, out)
        scale = c.attention_scale if c.attention_scale is not None else s.query**-0.5
        self.attn = self.attention_class(layer, heads, s, scale)
        self.dtype, self.device = options.dtype, options.device

    def forward(self, x: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        return self.attend(self.write(x, angles, ctx), ctx)

    def write(self, x: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        return self._write(self.in_proj(x), angles, ctx)

    def attend(self, q: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.o_proj(self.attn.attend(q, ctx))

    def forward_fused(
        self, stream: torch.Tensor, norm: RMSNormParams, angles: Angles | None, ctx: ForwardContext
    ) -> torch.Tensor:
        return self.attend_fused(self.write_fused(stream, norm, angles, ctx), stream, ctx)

    def write_fused(
        self, stream: torch.Tensor, norm: RMSNormParams, angles: Angles | None, ctx: ForwardContext
    ) -> torch.Tensor:
        return self._write(self.in_proj.fused(stream, norm=norm), angles, ctx)

    def attend_fused(self, q: torch.Tensor, stream: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.o_proj.fused(self.attn.attend(q, ctx), residual=stream)

    def _write(self, inputs: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        assert angles is not None
        width = self.in_proj.out_partition_sizes[0]
        q, kv = inputs[:, :width], inputs[:, width:]
        if self.q_norm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_norm(q))
        return self.attn.write(q, kv, self.kv_norm.params, angles, ctx)

    @property
    def fuses(self) -> bool:
        return can_fuse(self.in_proj, self.o_proj)

    @property
    def fuses_terms(self) -> bool:
        return can_fuse_terms(self.in_proj, self.o_proj)

    @property
    def writes_apart(self) -> bool:
        """Whether `write` and `attend` do what a call does."""
        return is_plain(self, LatentSelfAttention) and is_plain(self.attn, LatentAttention)

    def process_after_loading(self) -> None:
        """Once kv_b_proj is ready: its product with the identity is its weight, however that is stored."""
        assert self.kv_b_proj is not None
        identity = torch.eye(self.sizes.rank, dtype=self.dtype, device=self.device)
        self.attn.set_weights(self.kv_b_proj(identity).T)
        self.kv_b_proj = None


class IndexedSelfAttention(LatentSelfAttention):
    """With the index of DeepSeek's sparse attention, which every rank has whole: all select the same tokens."""

    attention_class = IndexedLatentAttention
    fuses = False

    def __init__(self, build: "BuildContext", layer: int) -> None:
        super().__init__(build, layer)
        hidden, options = build.config.hidden_size, build.options
        assert self.sizes.index is not None and self.sizes.q_rank is not None
        self.index, placed = self.sizes.index, (options.dtype, options.device)
        module, width = f"{build.config.names.attention}.indexer", self.sizes.index.num_heads
        methods = {name: build.method(layer, module, (name,)) for name in ("wq_b", "wk")}
        sizes = (self.sizes.q_rank, width * self.index.size)
        self.index_q = ColumnParallelLinear(*sizes, False, *placed, method=methods["wq_b"])
        self.index_k = ColumnParallelLinear(hidden, self.index.size, False, *placed, method=methods["wk"])
        self.index_norm = LayerNorm(self.index.size, EPS, True, options.device)
        self.index_weights = ColumnParallelLinear(hidden, width, False, *placed)

    def forward(self, x: torch.Tensor, angles: Angles | None, ctx: ForwardContext) -> torch.Tensor:
        assert angles is not None and self.q_norm is not None and self.q_b_proj is not None
        inputs, width = self.in_proj(x), self.in_proj.out_partition_sizes[0]
        compressed = self.q_norm(inputs[:, :width])
        heads = self.index_q(compressed).unflatten(-1, (self.index.num_heads, self.index.size))
        # Both factors of a score, of the product and of a head.
        weights = self.index_weights(x).float() * (self.index.num_heads * self.index.size) ** -0.5
        index = IndexInputs(heads, self.index_norm(self.index_k(x)), weights)
        q = self.q_b_proj(compressed)
        return self.o_proj(self.attn(q, inputs[:, width:], self.kv_norm.params, angles, ctx, index))


def attention_block(build: "BuildContext", layer: int) -> LatentSelfAttention:
    assert build.config.latent is not None
    kind = LatentSelfAttention if build.config.latent.index is None else IndexedSelfAttention
    return kind(build, layer)


def latent_sizes(hf: dict[str, Any], interleaved: bool) -> LatentSizes:
    """`interleaved`: the family's default."""
    require(hf, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    given = hf.get("rope_interleave")
    return LatentSizes(
        q_rank=hf.get("q_lora_rank"),
        rank=hf["kv_lora_rank"],
        nope=hf["qk_nope_head_dim"],
        rope=hf["qk_rope_head_dim"],
        v=hf["v_head_dim"],
        interleaved=interleaved if given is None else bool(given),
        index=_index_sizes(hf) if hf.get("index_topk") is not None else None,
    )


def _index_sizes(hf: dict[str, Any]) -> IndexSizes:
    require(hf, "q_lora_rank", "index_n_heads", "index_head_dim")
    most = {"index_n_heads": MAX_HEADS, "index_head_dim": MAX_HEAD_DIM, "index_topk": MAX_POSITIONS}
    heads, size, top_k = (whole_number(name, hf[name], maximum=limit) for name, limit in most.items())
    sizes = IndexSizes(heads, size, top_k, bool(hf.get("indexer_rope_interleave", False)))
    if sizes.size < hf["qk_rope_head_dim"]:
        raise ValueError(
            f"index_head_dim is {sizes.size}; it must be at least qk_rope_head_dim, {hf['qk_rope_head_dim']}"
        )
    return sizes


def latent_config(hf: dict[str, Any], interleaved: bool, **differences: Any) -> DecoderConfig:
    """DecoderConfig.from_hf for such a family."""
    require(hf, "num_hidden_layers")
    sizes = latent_sizes(hf, interleaved)
    bias = bool(hf.get("attention_bias", False))
    if bias and sizes.q_rank is None:
        raise ValueError("attention_bias needs q_lora_rank: biases of uncompressed queries are not supported")
    return DecoderConfig.from_hf(
        hf | {"head_dim": sizes.query, "num_key_value_heads": None},
        ropes=(RopeParameters.from_hf(hf, sizes.rope),) * hf["num_hidden_layers"],
        latent=sizes,
        attention_scale=sizes.query**-0.5 * _magnitude(hf) ** 2,
        qkv_bias=bias,
        o_bias=bias,
        **differences,
    )


def _magnitude(hf: dict[str, Any]) -> float:
    """By which YaRN scales queries and keys: only their rotated parts by itself, all of them by mscale_all_dim."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default" or not given.get("mscale_all_dim"):
        return 1.0
    factor, scale = (
        finite_number(f"{name} of the rope parameters", given.get(name), 0.0, MAX_NUMBER)
        for name in ("factor", "mscale_all_dim")
    )
    return yarn_magnitude(factor, scale)
