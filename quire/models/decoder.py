"""The decoder that Llama and its relatives share. A family is this plus a few declared differences."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from quire.attention.base import ForwardContext
from quire.kernels.rope import apply_rope
from quire.kernels.silu_mul import silu_mul
from quire.layers.attention import Attention
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedColumnParallelLinear, ParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.parallel import SINGLE, TensorParallel
from quire.layers.rotary import RopeParameters, RotaryEmbedding
from quire.models.decoder_config import DecoderConfig
from quire.models.weight_map import Rule, WeightMap

CosSin = tuple[torch.Tensor, torch.Tensor]

DECODER_WEIGHTS = WeightMap(
    rules=(
        Rule("model.embed_tokens.weight", "embed_tokens.weight"),
        Rule("model.layers.{i}.self_attn.q_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", "q"),
        Rule("model.layers.{i}.self_attn.k_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", "k"),
        Rule("model.layers.{i}.self_attn.v_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", "v"),
        Rule("model.layers.{i}.self_attn.o_proj.{p}", "layers.{i}.self_attn.o_proj.{p}"),
        Rule("model.layers.{i}.mlp.gate_proj.{p}", "layers.{i}.mlp.gate_up_proj.{p}", 0),
        Rule("model.layers.{i}.mlp.up_proj.{p}", "layers.{i}.mlp.gate_up_proj.{p}", 1),
        Rule("model.layers.{i}.mlp.down_proj.{p}", "layers.{i}.mlp.down_proj.{p}"),
        Rule("model.layers.{i}.input_layernorm.weight", "layers.{i}.input_layernorm.weight"),
        Rule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.post_attention_layernorm.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
    ),
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)

# A tied head may be packed in addition to the embedding while the copy keeps memory below 1.3 times the weights.
MAX_EXTRA_FOR_TIED_HEAD = 0.28


class SelfAttention(nn.Module):
    def __init__(
        self, config: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device, tp: TensorParallel
    ) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.qkv_proj = QKVParallelLinear(
            c.hidden_size, c.head_dim, c.num_heads, c.num_kv_heads, c.qkv_bias, dtype, device, tp
        )
        self.o_proj = RowParallelLinear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias, dtype, device, tp)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, device) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, device) if c.qk_norm else None
        self.attn = Attention(layer, self.num_heads, self.num_kv_heads, c.head_dim, c.head_dim**-0.5, c.windows[layer])

    def forward(self, x: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext) -> torch.Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        q_and_k, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = q_and_k.split((self.num_heads, self.num_kv_heads), dim=1)
            q_and_k = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        # Queries and keys lie side by side and turn by the same angles: one call instead of two.
        q, k = apply_rope(q_and_k, *cos_sin).split((self.num_heads, self.num_kv_heads), dim=1)
        return self.o_proj(self.attn(q, k, v, ctx))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, tp: TensorParallel) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], bias, dtype, device, tp)
        self.down_proj = RowParallelLinear(inner, hidden, bias, dtype, device, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(
        self, config: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.self_attn = SelfAttention(config, layer, dtype, device, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device, tp)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: CosSin, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x is what the layer before added, residual the stream before that (None in the first layer)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos_sin, ctx)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """A decoder-only language model. Families override `configure` and, where names differ, `weights`."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS
    num_parameters: int

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        """The family's reading of its Hugging Face config."""
        return DecoderConfig.from_hf(hf)

    def __init__(
        self, hf: dict[str, Any], dtype: torch.dtype, device: torch.device, tp: TensorParallel = SINGLE
    ) -> None:
        """Parameters are left uninitialised; models/loader.py fills them."""
        super().__init__()
        self.config = c = self.configure(hf)
        self.embed_tokens = VocabEmbedding(c.vocab_size, c.hidden_size, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(c, i, dtype, device, tp) for i in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, device)
        tied_to = self.embed_tokens if c.tie_word_embeddings else None
        self.lm_head = LMHead(c.vocab_size, c.hidden_size, dtype, device, tied_to)
        distinct: list[RopeParameters] = list(dict.fromkeys(c.ropes))
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope, dtype, device) for rope in distinct)
        self.rotary_of_layer = [distinct.index(rope) for rope in c.ropes]

    def forward(
        self,
        input_ids: torch.Tensor,  # [N]
        positions: torch.Tensor,  # [N]
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,  # [N, hidden], instead of input_ids
        intermediate: dict[str, torch.Tensor] | None = None,  # from the pipeline stage before
    ) -> torch.Tensor:  # [N, hidden]
        if intermediate is not None:
            raise NotImplementedError("pipeline stages are not connected yet")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cos_sin = [rotary(positions) for rotary in self.rotaries]
        residual: torch.Tensor | None = None
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            x, residual = layer(x, residual, cos_sin[rotary], ctx)
        if residual is None:
            return self.norm(x)
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] in the compute dtype."""
        return self.lm_head(hidden_rows)

    def attention_layers(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    def weight_map(self) -> WeightMap:
        # A tied checkpoint may still carry the head, as a copy of the embedding.
        return self.weights.ignoring("lm_head.weight") if self.lm_head.tied else self.weights

    def process_after_loading(self) -> None:
        total = self.num_parameters = sum(p.numel() for p in self.parameters())  # packing will hide some of them
        for linear in self._linears():
            linear.process_after_loading()
        if not self.lm_head.tied or self.lm_head.weight.numel() <= MAX_EXTRA_FOR_TIED_HEAD * total:
            self.lm_head.process_after_loading()

    def _linears(self) -> Iterator[ParallelLinear]:
        return (module for module in self.modules() if isinstance(module, ParallelLinear))
