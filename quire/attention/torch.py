"""Attention over pages in torch: the fallback on a CPU, and the reference on any device.

Pages are gathered, then multiplied by batched matmuls with the query heads of a KV head side by side, so K and V are
never repeated. On a CPU in bf16 this measured twice as fast as torch's scaled_dot_product_attention, both for decode
rows and, in blocks of queries, for prompts. In float32 the latter is up to 1.4 times as fast for long prompts, which
does not justify a second path.
"""

from dataclasses import dataclass, field, replace

import torch

from quire.attention.base import Angles, AttentionBackend, GroupFeatures, StepInputs
from quire.attention.pages import DecodeBatch, PromptRow, plan_decode, plan_prompts
from quire.attention.simple_pages import needs_simple_pages
from quire.kernels.kv_scales import KVScales, dequantized
from quire.kernels.kv_write import cache_rows, kv_write, kv_write_padded, kv_write_scaled
from quire.kernels.paged_attention import AttentionFeatures
from quire.kernels.rope_and_write import QKNormParams, norm_and_rope
from quire.messages.kv_cache import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.platforms.base import Platform


@dataclass
class Plan:
    """The pages that a step gathers and the keys it masks; the same for every layer of a group."""

    decode: list[DecodeBatch]
    prompts: list[PromptRow]
    scratch: torch.Tensor  # [most pages gathered at once, block_size * D]: reused by all layers


@dataclass
class TorchMetadata:
    """Rows of the step, and the plans, each made by the first layer that needs it."""

    step: StepInputs
    block_table: torch.Tensor
    block_size: int
    plans: dict[tuple[int, int, int | None, bool], Plan] = field(default_factory=dict)
    rows_to_write: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def write_rows(self, num_kv_heads: int, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if num_kv_heads not in self.rows_to_write:
            self.rows_to_write[num_kv_heads] = cache_rows(slot_mapping, num_kv_heads, self.block_size)
        return self.rows_to_write[num_kv_heads]

    def plan(self, kv_cache: torch.Tensor, window: int | None, causal: bool) -> Plan:
        num_kv_heads, head_size = kv_cache.shape[2], kv_cache.shape[-1]
        key = (num_kv_heads, head_size, window, causal)
        if key not in self.plans:
            rows = (self.step.query_start, self.step.seq_lens, self.block_table)
            decode = plan_decode(*rows, self.block_size, num_kv_heads, window)
            prompts = plan_prompts(*rows, self.block_size, num_kv_heads, window, causal)
            gathers = [batch.pages for batch in decode] + [row.pages for row in prompts]
            most = max((len(pages) for pages in gathers), default=0)
            scratch = kv_cache.new_empty(most, self.block_size * head_size)
            self.plans[key] = Plan(decode, prompts, scratch)
        return self.plans[key]


class TorchBackend(AttentionBackend):
    name = "torch"
    kinds = (FullAttentionSpec, SlidingWindowSpec)

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        if not features.causal and isinstance(spec, SlidingWindowSpec):
            return "causal attention where there is a window"
        assert isinstance(spec, FullAttentionSpec)
        quantized = (spec.dtype,) if spec.scale_dtype is not None else ()
        return needs_simple_pages(dtype, spec, replace(features, padded=False, causal=True), quantized)

    @classmethod
    def declines(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> str | None:
        if not platform.supports_triton or features.padded or not features.causal:
            return None
        return "it is slow on a GPU (--attention-backend torch requests it)"

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> TorchMetadata:
        return TorchMetadata(step, block_table[step.rows], block_size)

    def write(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        qk_norm: QKNormParams | None,
        angles: Angles | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: TorchMetadata,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        num_kv_heads = kv_cache.shape[2]
        cos_sin = angles.cos_sin if angles is not None else None
        q, k, v = norm_and_rope(qkv, num_heads, num_kv_heads, qk_norm, cos_sin)
        if scales is not None:
            kv_write_scaled(k, v, kv_cache, slot_mapping, scales)
        elif kv_cache.is_contiguous():
            kv_write(k, v, kv_cache, metadata.write_rows(num_kv_heads, slot_mapping))
        else:
            kv_write_padded(k, v, kv_cache, slot_mapping)
        return q

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: TorchMetadata, features: AttentionFeatures
    ) -> torch.Tensor:
        num_tokens, num_heads, head_size = q.shape
        num_kv_heads = kv_cache.shape[2]
        plan = metadata.plan(kv_cache, features.window, features.causal)

        plain = features.kv_scales is None and kv_cache.is_contiguous()
        pages = kv_cache.view(-1, metadata.block_size * head_size) if plain else kv_cache
        grouped = (q * features.scale).view(num_tokens, num_kv_heads, -1, head_size)
        out = torch.zeros_like(grouped)  # padding tokens belong to no row; zeros keep them finite
        for batch in plan.decode:
            out[batch.tokens] = _attend_decode(grouped[batch.tokens], pages, batch, plan.scratch, features)
        for row in plan.prompts:
            _attend_prompt(grouped, pages, row, plan.scratch, features, out)
        return out.view(num_tokens, num_heads, head_size)


def _gather(
    pages: torch.Tensor, index: torch.Tensor, scratch: torch.Tensor, q: torch.Tensor, scales: KVScales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages by index, keys before values, heads before rows before pages -> k, v [KV, tokens, D]. `pages`: [pages,
    block_size * D], or a cache that is padded or has scales as it is. q: [..., KV, G, D]."""
    num_kv_heads, head_size = q.shape[1], q.shape[-1]
    if pages.dim() > 2:
        blocks = index[: len(index) // (2 * num_kv_heads)] // (2 * num_kv_heads)  # those of the first head's keys
        found = dequantized(pages, blocks, scales, q.dtype)
        k, v = found.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_size)
        return k, v
    torch.index_select(pages, 0, index, out=scratch[: len(index)])
    kv = scratch[: len(index)].view(2, num_kv_heads, -1, head_size)
    return kv[0], kv[1]


def _attend_decode(
    q: torch.Tensor, pages: torch.Tensor, batch: DecodeBatch, scratch: torch.Tensor, features: AttentionFeatures
) -> torch.Tensor:
    """q [B, KV, G, D] -> the same shape."""
    rows, kv_heads, group, head_size = q.shape
    k, v = _gather(pages, batch.pages, scratch, q, features.kv_scales)
    flat_q = q.transpose(0, 1).reshape(kv_heads * rows, group, head_size)
    raw = torch.bmm(flat_q, k.view(kv_heads * rows, -1, head_size).transpose(1, 2))
    scores = _cap_scores(raw.view(kv_heads, rows, group, -1), features)
    if features.slopes is not None:
        distances = batch.first[:, None] + torch.arange(scores.shape[-1], device=q.device)
        scores += features.slopes.view(kv_heads, 1, group, 1) * distances[:, None]
    scores.masked_fill_(batch.masked, -torch.inf)
    weights = _softmax(scores, features, (kv_heads, 1, group, 1)).view(raw.shape).to(v.dtype)
    out = torch.bmm(weights, v.view(kv_heads * rows, -1, head_size))
    return out.view(kv_heads, rows, group, head_size).transpose(0, 1)


def _attend_prompt(
    q: torch.Tensor,
    pages: torch.Tensor,
    row: PromptRow,
    scratch: torch.Tensor,
    features: AttentionFeatures,
    out: torch.Tensor,
) -> None:
    """q, out [N, KV, G, D]: fills out for the row's tokens."""
    _, kv_heads, group, head_size = q.shape
    k, v = _gather(pages, row.pages, scratch, q, features.kv_scales)
    for block in row.blocks:
        queries = slice(block.first_token, block.first_token + block.num_tokens)
        keys = slice(block.first_key, block.last_key)
        # [T, KV, G, D] -> [KV, G * T, D]: one matmul per KV head serves its whole group.
        flat_q = q[queries].permute(1, 2, 0, 3).reshape(kv_heads, -1, head_size)
        raw = torch.bmm(flat_q, k[:, keys].transpose(1, 2))
        scores = _cap_scores(raw.view(kv_heads, group, block.num_tokens, -1), features)
        if features.slopes is not None:
            key, query = (torch.arange(n, device=q.device) for n in (scores.shape[-1], block.num_tokens))
            scores += features.slopes.view(kv_heads, group, 1, 1) * (block.first + key - query[:, None])
        scores[..., block.masked_from :].masked_fill_(block.masked, -torch.inf)
        weights = _softmax(scores, features, (kv_heads, group, 1, 1)).view(raw.shape).to(v.dtype)
        result = torch.bmm(weights, v[:, keys])
        out[queries] = result.view(kv_heads, group, block.num_tokens, head_size).permute(2, 0, 1, 3)


def _cap_scores(scores: torch.Tensor, features: AttentionFeatures) -> torch.Tensor:
    """Scores with the soft-cap, if any; in float32 if biases or sinks are added to them."""
    if features.softcap is not None:
        return scores.float().div_(features.softcap).tanh_().mul_(features.softcap)
    return scores.float() if features.slopes is not None or features.sinks is not None else scores


def _softmax(scores: torch.Tensor, features: AttentionFeatures, by_head: tuple[int, ...]) -> torch.Tensor:
    if features.sinks is None:
        return scores.softmax(-1)
    sinks = features.sinks.view(by_head).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1].contiguous()
