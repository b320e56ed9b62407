"""The decoder that Llama and its relatives share. A family is this plus a few declared differences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.kernels.rope_and_write import Norms
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_table import MAX_FUSED_ROWS
from quire.layers.attention import Attention
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedColumnParallelLinear, ParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.parallel import SINGLE, TensorParallel
from quire.layers.rotary import RopeParameters, RotaryEmbedding
from quire.models.decoder_config import DecoderConfig
from quire.models.weight_map import Rule, WeightMap
from quire.quantization.base import Quantization
from quire.quantization.packed import packed_weights
from quire.quantization.unquantized import UNQUANTIZED

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
        self,
        config: DecoderConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
        quantization: Quantization,
    ) -> None:
        super().__init__()
        c = config
        name = f"model.layers.{layer}.self_attn"
        qkv_method = quantization.linear_method(name, ("q_proj", "k_proj", "v_proj"))
        o_method = quantization.linear_method(name, ("o_proj",))
        self.head_dim = c.head_dim
        self.qkv_proj = QKVParallelLinear(
            c.hidden_size, c.head_dim, c.num_heads, c.num_kv_heads, c.qkv_bias, dtype, device, tp, qkv_method
        )
        self.o_proj = RowParallelLinear(c.num_heads * c.head_dim, c.hidden_size, c.o_bias, dtype, device, tp, o_method)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, device) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, device) if c.qk_norm else None
        self.attn = Attention(layer, self.num_heads, self.num_kv_heads, c.head_dim, c.head_dim**-0.5, c.windows[layer])

    def forward(self, x: torch.Tensor, angles: Angles, ctx: ForwardContext) -> torch.Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x), ctx, angles, self.norms()))

    def norms(self) -> Norms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class MLP(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
        quantization: Quantization,
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        name = f"model.layers.{layer}.mlp"
        gate_up_method = quantization.linear_method(name, ("gate_proj", "up_proj"))
        down_method = quantization.linear_method(name, ("down_proj",))
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], bias, dtype, device, tp, gate_up_method)
        self.down_proj = RowParallelLinear(inner, hidden, bias, dtype, device, tp, down_method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
        quantization: Quantization,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.self_attn = SelfAttention(config, layer, dtype, device, tp, quantization)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, layer, dtype, device, tp, quantization)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x is what the layer before added, residual the stream before that (None in the first layer)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, angles, ctx)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def forward_fused(self, stream: torch.Tensor, angles: Angles, ctx: ForwardContext) -> torch.Tensor:
        """The whole residual stream in and out, for few rows on a GPU, where each kernel spared is a gain."""
        attention, mlp = self.self_attn, self.mlp
        qkv = attention.qkv_proj.fused(stream, norm=self.input_layernorm.for_fusing)
        heads = attention.attn(qkv, ctx, angles, attention.norms())
        stream = attention.o_proj.fused(heads, residual=stream)
        inner = mlp.gate_up_proj.fused(stream, norm=self.post_attention_layernorm.for_fusing, silu=True)
        return mlp.down_proj.fused(inner, residual=stream)


class DecoderModel(nn.Module):
    """A decoder-only language model. Families override `configure` and, where names differ, `weights`."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS
    num_parameters: int
    max_fused_rows = 0

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        """The family's reading of its Hugging Face config."""
        return DecoderConfig.from_hf(hf)

    def __init__(
        self,
        hf: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        quantization: Quantization = UNQUANTIZED,
    ) -> None:
        """Parameters are left uninitialised; models/loader.py fills them."""
        super().__init__()
        self.config = c = self.configure(hf)
        self.tp = tp
        self.embed_tokens = VocabEmbedding(c.vocab_size, c.hidden_size, dtype, device, quantization.vocab_method())
        self.layers = nn.ModuleList(DecoderLayer(c, i, dtype, device, tp, quantization) for i in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, device)
        tied_to = self.embed_tokens if c.tie_word_embeddings else None
        self.lm_head = LMHead(c.vocab_size, c.hidden_size, dtype, device, tied_to, quantization.vocab_method())
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
        angles = [rotary(positions) for rotary in self.rotaries]
        if len(x) <= self.max_fused_rows:
            return self._forward_fused(x, angles, ctx)
        residual: torch.Tensor | None = None
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            x, residual = layer(x, residual, angles[rotary], ctx)
        if residual is None:
            return self.norm(x)
        return self.norm.add(x, residual)[0]

    def _forward_fused(self, stream: torch.Tensor, angles: list[Angles], ctx: ForwardContext) -> torch.Tensor:
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            assert isinstance(layer, DecoderLayer)
            stream = layer.forward_fused(stream, angles[rotary], ctx)
        return self.norm(stream)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] in the compute dtype."""
        return self.lm_head(hidden_rows)

    def attention_layers(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Inside, the model has one layer for each kind of attention: what differs in kernels, but not in numbers."""
        layers, rotaries = self.layers, self.rotary_of_layer
        kinds = {window: i for i, window in reversed(list(enumerate(self.config.windows)))}
        self.layers = nn.ModuleList(layers[i] for i in kinds.values())
        self.rotary_of_layer = [rotaries[i] for i in kinds.values()]
        try:
            yield
        finally:
            self.layers, self.rotary_of_layer = layers, rotaries

    def weight_map(self) -> WeightMap:
        # A tied checkpoint may still carry the head, as a copy of the embedding.
        return self.weights.ignoring("lm_head.weight") if self.lm_head.tied else self.weights

    def process_after_loading(self) -> None:
        plain = sum(p.numel() for p in self.parameters())  # packing will hide some of them
        total = self.num_parameters = plain + sum(weight.numel for weight in packed_weights(self))
        for linear in self._linears():
            linear.process_after_loading()
        extra = sum(p.numel() for p in self.lm_head.parameters()) if self.lm_head.tied else 0
        if extra <= MAX_EXTRA_FOR_TIED_HEAD * total:
            self.lm_head.process_after_loading()

        fuses = self.tp.size == 1 and all(linear.method.can_fuse(linear) for linear in self._linears())
        self.max_fused_rows = MAX_FUSED_ROWS if fuses else 0

    def _linears(self) -> Iterator[ParallelLinear]:
        return (module for module in self.modules() if isinstance(module, ParallelLinear))
