"""The decoder shared by Llama-like models. A family is this plus the differences it declares."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.checkpoint.tensors import CheckpointTensor, read_part
from quire.kernels.add import add, add_rows
from quire.layers.cache_layer import CacheLayer
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.bypass import any_global_hook, has_hooks, has_own_hooks, is_plain
from quire.models.config_checks import check_keys
from quire.models.decoder_config import DecoderConfig
from quire.models.decoder_layers import MLP, BuildContext, DecoderLayer, FeedForward
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.options import ModelOptions
from quire.models.stage import LayerList
from quire.quantization.base import LinearMethod, Quantization, QuantizesHead
from quire.quantization.block_quantized import block_quantized_weights

DECODER_WEIGHTS = WeightMap(
    rules=(
        Rule("model.embed_tokens.weight", "embed_tokens.weight"),
        Rule("model.embed_positions.weight", "embed_positions.weight"),
        Rule("model.layers.{i}.self_attn.q_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", "q"),
        Rule("model.layers.{i}.self_attn.k_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", "k"),
        Rule("model.layers.{i}.self_attn.v_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", "v"),
        Rule("model.layers.{i}.self_attn.qkv_proj.{p}", "layers.{i}.self_attn.qkv_proj.{p}", ("q", "k", "v")),
        Rule("model.layers.{i}.self_attn.o_proj.{p}", "layers.{i}.self_attn.o_proj.{p}"),
        Rule("model.layers.{i}.mlp.gate_proj.{p}", "layers.{i}.mlp.up_proj.{p}", 0),
        Rule("model.layers.{i}.mlp.up_proj.{p}", "layers.{i}.mlp.up_proj.{p}", 1),
        Rule("model.layers.{i}.mlp.gate_up_proj.{p}", "layers.{i}.mlp.up_proj.{p}", (0, 1)),
        Rule("model.layers.{i}.mlp.down_proj.{p}", "layers.{i}.mlp.down_proj.{p}"),
        Rule("model.layers.{i}.input_layernorm.{p}", "layers.{i}.attention_norm.{p}"),
        Rule("model.layers.{i}.post_attention_layernorm.{p}", "layers.{i}.mlp_norm.{p}"),
        Rule("model.norm.{p}", "norm.{p}"),
        Rule("lm_head.weight", "lm_head.weight"),
        Rule("lm_head.{p}", "lm_head.{p}"),  # of a quantized head
    ),
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)
UNGATED = (Rule("model.layers.{i}.mlp.up_proj.{p}", "layers.{i}.mlp.up_proj.{p}", 0),)
QK_NORMS = (
    Rule("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
    Rule("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
)

# Packing a tied head copies the embedding: only done while that keeps memory below 1.3 times the weights.
MAX_EXTRA_FOR_TIED_HEAD = 0.28


@runtime_checkable
class HasProcessAfterLoading(Protocol):
    """A layer whose weights are converted once they are loaded: linears, experts."""

    def process_after_loading(self) -> None: ...


class DecoderModel(nn.Module):
    """A decoder-only language model. A family overrides `configure` and, where tensor names differ, `weights` or
    `family_weights`; one with other blocks than MLPs also `make_mlp`. A stage has what it needs of this: the embedding
    on the first (and on the last, if the head is tied to it), norm and head on the last."""

    embed_tokens: VocabEmbedding
    norm: RMSNorm | LayerNorm
    lm_head: LMHead
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS
    num_parameters: int
    capturable = True
    leaves_panels_only = True  # if its layers do (models/loading/packed_cache.py)
    mapped_bytes = 0  # of weights mapped from the packed cache (models/loading/packed_cache.py)
    max_fused_rows = 0
    kernel_row_counts: tuple[int, ...] = ()
    feature_kinds: tuple[str, ...] = ()

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        """Translate the family's Hugging Face config."""
        return DecoderConfig.from_hf(hf)

    @classmethod
    def read_config(cls, hf: dict[str, Any]) -> DecoderConfig:
        """`configure` for an untrusted config: any error in it is a ValueError."""
        try:
            check_keys(hf)
            return cls.configure(hf)
        except KeyError as error:
            raise ValueError(f"the model's config lacks {error.args[0]}") from error
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the model's config has a value of a wrong type: {error}") from error

    def family_weights(self) -> WeightMap:
        """Override where rules depend on the config."""
        return self.weights

    def regroup_tensors(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        """Override where one parameter is stored as several tensors in the checkpoint."""
        return tensors

    def make_layer(self, build: BuildContext, layer: int) -> DecoderLayer:
        return DecoderLayer(build, layer, self.make_mlp(build, layer))

    def make_output(self, build: BuildContext) -> None:
        """What follows the layers."""
        c, options = build.config, build.options
        self.norm = build.norm()
        tied_to = self.embed_tokens if c.tie_word_embeddings else None
        method = _head_method(options.quantization, c.tie_word_embeddings)
        vocab = (c.vocab_size, c.hidden_size, options.dtype, options.device)
        self.lm_head = LMHead(*vocab, tied_to, method, options.tp)

    def make_mlp(self, build: BuildContext, layer: int) -> FeedForward:
        return MLP(build, layer)

    def __init__(
        self,
        hf: dict[str, Any],  # the checkpoint's config
        options: ModelOptions,
    ) -> None:
        """Parameters are left uninitialised; models/loading/weight_loader.py loads them."""
        super().__init__()
        self.hf, self.options = hf, options
        self.config = c = self.read_config(hf).limited_to(options.max_model_len)
        build, dtype, device = BuildContext(c, options), options.dtype, options.device
        vocab = (c.vocab_size, c.hidden_size, dtype, device)
        self.stage, tied = options.stage, c.tie_word_embeddings
        self.layer_numbers = self.stage.layers(c.num_layers)
        if self.stage.is_first or (self.stage.is_last and tied):
            self.embed_tokens = VocabEmbedding(*vocab, options.quantization.vocab_method(), c.embed_scale, options.tp)
        rows = c.num_positions + c.position_offset if self.stage.is_first else 0
        self.embed_positions = VocabEmbedding(rows, c.hidden_size, dtype, device) if c.num_positions and rows else None
        numbers = self.layer_numbers
        self.layers = LayerList(numbers, (self.make_layer(build, i) for i in numbers))
        if self.stage.is_last:
            self.make_output(build)
        ropes = c.ropes[numbers.start : numbers.stop]
        distinct = [rope for rope in dict.fromkeys(ropes) if rope is not None]
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope, dtype, device) for rope in distinct)
        self.rotary_of_layer = [None if rope is None else distinct.index(rope) for rope in ropes]

    @property
    def max_positions(self) -> int | None:
        """Kernels do not check that a position is within their table."""
        lengths = [rope.max_positions for rope in self.config.ropes if rope is not None]
        lengths += [self.config.num_positions] if self.config.num_positions else []
        return min(lengths, default=None)

    def forward(
        self,
        input_ids: torch.Tensor,  # [N]
        positions: torch.Tensor,  # [N], or [3, N]
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,  # [N, hidden], instead of input_ids; the stream of the stage before
    ) -> torch.Tensor:  # [N, hidden]: what the head multiplies, or the stream for the next stage
        x, angles = self._first_stream(input_ids, positions, inputs_embeds)
        if len(x) <= self.max_fused_rows and not (ctx.adapters and self._splits_terms()):
            return self._forward_fused(x, angles, ctx)
        x, residual = self._through(list(self._layers()), x, angles, ctx)
        streams = ctx.streams
        if not self.stage.is_last:
            return x if residual is None else add(x, residual)
        if residual is None:
            return self.norm(x)
        if streams is not None:
            _set_last(streams, lambda: add(x, residual))
        return self.norm.add(x, residual)[0]

    def forward_to_last(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, angles = self._first_stream(input_ids, positions, inputs_embeds)
        *before, last = self._layers()
        rotary = self.rotary_of_layer[-1]
        last_angles = None if rotary is None else angles[rotary]
        if len(x) <= self.max_fused_rows:
            return last.write_fused(self._through_fused(before, x, angles, ctx), last_angles, ctx)
        x, residual = self._through(before, x, angles, ctx)
        return last.write(x, residual, last_angles, ctx)

    def forward_last(self, q: torch.Tensor, stream: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        *_, last = self.layers
        assert isinstance(last, DecoderLayer)
        if len(stream) <= self.max_fused_rows:
            return self.norm(last.attend_fused(q, stream, ctx))
        return self.norm.add(*last.attend(q, stream, ctx))[0]

    def writes_last_apart(self) -> bool:
        if not (self.stage.is_last and is_plain(self, DecoderModel)):
            return False
        *_, last = self.layers
        can_write = isinstance(last, DecoderLayer) and last.writes_apart
        return can_write and not (any_global_hook() or has_own_hooks(self) or has_hooks(last))

    def last_group(self) -> int:
        *_, last = self.layers
        assert isinstance(last, DecoderLayer) and isinstance(last.self_attn.attn, CacheLayer)
        return last.self_attn.attn.group

    def _first_stream(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Angles]]:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            x = add_rows(x, self.embed_positions.weight, positions, self.config.position_offset)
        return x, [rotary(positions) for rotary in self.rotaries]

    def _splits_terms(self) -> bool:
        """Whether adapters need layers that are not fused."""
        return not all(layer.fuses_terms for layer in self._layers())

    def _through(
        self, layers: Sequence[DecoderLayer], x: torch.Tensor, angles: list[Angles], ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first layers: their output, not yet added to the residual stream."""
        residual: torch.Tensor | None = None
        streams = ctx.streams
        for i, (layer, rotary) in enumerate(zip(layers, self.rotary_of_layer, strict=False)):
            if streams is not None and i in streams and residual is not None:
                streams[i] = add(x, residual)
            x, residual = layer(x, residual, None if rotary is None else angles[rotary], ctx)
        return x, residual

    def _forward_fused(self, stream: torch.Tensor, angles: list[Angles], ctx: ForwardContext) -> torch.Tensor:
        stream = self._through_fused(list(self._layers()), stream, angles, ctx)
        if ctx.streams is not None:
            _set_last(ctx.streams, lambda: stream)
        return self.norm(stream) if self.stage.is_last else stream

    def _through_fused(
        self, layers: Sequence[DecoderLayer], stream: torch.Tensor, angles: list[Angles], ctx: ForwardContext
    ) -> torch.Tensor:
        streams = ctx.streams
        for i, (layer, rotary) in enumerate(zip(layers, self.rotary_of_layer, strict=False)):
            if streams is not None and i in streams:
                streams[i] = stream
            stream = layer.forward_fused(stream, None if rotary is None else angles[rotary], ctx)
        return stream

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def position_axes(self) -> int:
        return 3 if any(rope is not None and rope.sections for rope in self.config.ropes) else 1

    @property
    def embeds_scale(self) -> float:
        return self.embed_tokens.scale if self.config.scales_given_embeds else 1.0

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, hidden]."""
        return self.embed_tokens(input_ids)

    def encode(self, kind: str, data: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Override where the family has encoders, for its `feature_kinds`."""
        raise NotImplementedError(f"{type(self).__name__} has no encoder for {kind}")

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] in the compute dtype."""
        logits, c = self.lm_head(hidden_rows), self.config
        if c.logit_scale != 1.0:
            logits = logits * c.logit_scale
        if c.logit_softcap is not None:
            logits = torch.tanh(logits / c.logit_softcap) * c.logit_softcap
        return logits

    def cache_layers(self) -> list[CacheLayer]:
        return [module for module in self.modules() if isinstance(module, CacheLayer)]

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Inside, the model has one layer of each kind: layers of a kind differ only in weights."""
        layers, rotaries = self.layers, self.rotary_of_layer
        kinds = {(layer.kind, rotaries[i]): i for i, layer in enumerate(self._layers())}
        every = list(layers)
        kept = sorted(kinds.values())  # the last layer is the last one's
        self.layers = LayerList(kept, (every[i] for i in kept))
        self.rotary_of_layer = [rotaries[i] for i in kept]
        try:
            yield
        finally:
            self.layers, self.rotary_of_layer = layers, rotaries

    def weight_map(self) -> WeightMap:
        weights = self.family_weights()
        # A tied checkpoint may still carry the head, as a copy of the embedding.
        return weights.ignoring(*self.head_names()) if self.has_tied_head else weights

    def adapted_names(self) -> WeightMap:
        return self.family_weights()

    @property
    def has_tied_head(self) -> bool:
        return self.stage.is_last and self.lm_head.tied

    def is_elsewhere(self, name: str) -> bool:
        """Whether another stage has this tensor of the checkpoint."""
        if self.stage.count == 1:
            return False
        word = self.config.names.layer.removesuffix(".{i}").rpartition(".")[2]
        if (found := re.search(rf"(?:^|\.){word}\.(\d+)\.", name)) is not None:
            return int(found[1]) < self.config.num_layers and int(found[1]) not in self.layer_numbers
        target = self.family_weights().target(name)
        ends = ("embed_tokens.", "embed_positions.", "norm.", "lm_head.")
        if target is None or not target.parameter.startswith(ends):
            return False
        return getattr(self, target.parameter.partition(".")[0], None) is None

    def head_names(self) -> tuple[str, ...]:
        """Names of the head in checkpoints."""
        return tuple(self.family_weights().names_of("lm_head.weight"))

    def check_tied_head(self, head: CheckpointTensor) -> None:
        """ValueError if a head that the config declares tied differs from the embedding."""
        embedding = getattr(self.embed_tokens, "weight", None)
        if embedding is None:
            return  # block-quantized, from a GGUF, which stores no copy
        rows = self.embed_tokens.rows
        same = tuple(head.shape) == rows.full_shape
        if same:
            read = torch.empty_like(embedding)
            read_part(head, read, 0, rows.start)
            same = torch.equal(read, embedding)
        if not same:
            raise ValueError(
                f"{head.name} differs from the embedding, but the config says that they are tied; "
                """--hf-overrides '{"tie_word_embeddings": false}' loads both"""
            )

    def process_after_loading(self) -> None:
        unquantized = sum(p.numel() for p in self.parameters())  # before packing removes some of them
        total = self.num_parameters = unquantized + sum(weight.numel for weight in block_quantized_weights(self))
        # Those inside others first.
        for module in (m for layer in self.layers for m in reversed(list(layer.modules()))):
            if isinstance(module, HasProcessAfterLoading):
                module.process_after_loading()
        if self.stage.is_last:
            self.process_output(total)
        self.max_fused_rows = self.max_fused_rows_of_layers()
        own = {count for module in self.layers.modules() for count in getattr(module, "kernel_row_counts", ())}
        self.kernel_row_counts = tuple(sorted(own.union(self.kernel_row_counts)))

    def max_fused_rows_of_layers(self) -> int:
        return min((layer.max_fused_rows for layer in self._layers()), default=0)

    def process_output(self, num_parameters: int) -> None:
        extra = sum(p.numel() for p in self.lm_head.parameters()) if self.has_tied_head else 0
        if extra <= MAX_EXTRA_FOR_TIED_HEAD * num_parameters:
            self.lm_head.process_after_loading()

    def _layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


def _set_last(streams: dict[int, torch.Tensor | None], stream: Callable[[], torch.Tensor]) -> None:
    """What no layer was entered with leaves the last one."""
    for i in [i for i, found in streams.items() if found is None]:
        streams[i] = stream()


def _head_method(quantization: Quantization, tied: bool) -> LinearMethod | None:
    if not tied and isinstance(quantization, QuantizesHead):
        return quantization.head_method()
    return quantization.vocab_method()
