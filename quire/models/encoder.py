"""Models for vectors and classes: the shared decoder without a head, and the encoder of BERT-like families."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.add import add_rows
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import ColumnParallelLinear
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.layers.norm import LayerNorm
from quire.models.base import TOKEN_TYPE_SHIFT
from quire.models.decoder import DecoderModel
from quire.models.decoder_layers import MLP, BuildContext, DecoderLayer, FeedForward, SelfAttention
from quire.models.encoder_config import EncoderConfig, HeadConfig, Task, num_labels, task_of
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.options import ModelOptions

HEAD_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = ACTIVATIONS | {"tanh": torch.tanh}


class PoolingModel(DecoderModel):
    """A decoder's layers, causal or not, without a language-model head. With one for classes where the checkpoint's
    architecture has it and the family declares it in `heads`."""

    is_pooling_model: ClassVar[bool] = True
    supports_generation: ClassVar[bool] = False
    capturable = False  # most compute whole texts without a cache, so no backend says that its steps can be
    default_pooling: ClassVar[str] = "CLS"
    heads: ClassVar[dict[Task, HeadConfig]] = {}
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {}
    has_tied_head = False
    head: "ClassificationHead | None"
    head_pooling: str | None = None
    num_labels = 0

    def __init__(self, hf: dict[str, Any], options: ModelOptions) -> None:
        super().__init__(hf, options)
        self.task, self.head = task_of(hf), None
        if self.task is not None:
            head = self.head_config(self.task)
            self.num_labels, self.head_pooling = num_labels(hf), head.pooling
            norm = (self.config.norm_eps, self.config.norm_bias)
            self.head = ClassificationHead(head, self.config.hidden_size, self.num_labels, *norm, options.device)

    def head_config(self, task: Task) -> HeadConfig:
        """Override where it depends on the checkpoint's config."""
        if task not in self.heads:
            raise ValueError(f"{type(self).__name__} has no head for {task} classification that is supported")
        return self.heads[task]

    def make_output(self, build: BuildContext) -> None:
        self.norm = build.norm()

    def family_weights(self) -> WeightMap:
        return self.weights if self.task is None else self.weights.with_rules(*self.head_rules[self.task])

    def head_names(self) -> tuple[str, ...]:
        return ()

    def process_output(self, num_parameters: int) -> None:
        pass

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"{type(self).__name__} does not generate text; it gives vectors or classes")

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """See SupportsPooling."""
        if self.head is None:
            raise ValueError(f"{type(self).__name__} has no classification head")
        return self.head(hidden)


class EncoderModel(PoolingModel):
    """Embeddings are normed, and maybe have token types; layers are normed after each block's sum, or before blocks."""

    weights: ClassVar[WeightMap]
    config: EncoderConfig

    def __init__(self, hf: dict[str, Any], options: ModelOptions) -> None:
        super().__init__(hf, options)
        c, build = self.config, BuildContext(self.config, options)
        if c.num_token_types:
            sizes = (c.vocab_size, c.num_token_types, c.hidden_size)
            self.embed_tokens = TypedEmbedding(*sizes, options.dtype, options.device)
        self.embedding_norm = build.norm() if c.embedding_norm else None

    def make_layer(self, build: BuildContext, layer: int) -> DecoderLayer:
        mlp = self.make_mlp(build, layer)
        if self.config.sum_norm:
            return SumNormLayer(build, layer, mlp)
        made = DecoderLayer(build, layer, mlp)
        if layer == 0 and not self.config.first_norm:
            made.attention_norm = None
        return made

    def make_output(self, build: BuildContext) -> None:
        if not self.config.sum_norm:
            self.norm = build.norm()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            x = add_rows(x, self.embed_positions.weight, positions, self.config.position_offset)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        angles = [rotary(positions) for rotary in self.rotaries]
        residual: torch.Tensor | None = None
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            x, residual = layer(x, residual, None if rotary is None else angles[rotary], ctx)
        return x if residual is None else self.norm.add(x, residual)[0]


class SumNormLayer(DecoderLayer):
    """norm(x + block(x)), as in BERT."""

    def __init__(self, build: BuildContext, layer: int, mlp: FeedForward) -> None:
        super().__init__(build, layer, mlp)
        self.attention_sum_norm, self.mlp_sum_norm = build.norm(), build.norm()

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, None]:
        assert isinstance(self.self_attn, SelfAttention) and isinstance(self.mlp, MLP)
        attended = self.self_attn.attended(x, angles, ctx)
        x = self.self_attn.o_proj.normed_sum(attended, x, self.attention_sum_norm)
        return self.mlp.down_proj.normed_sum(self.mlp.activated(x), x, self.mlp_sum_norm), None


class TypedEmbedding(VocabEmbedding):
    """Of token ids that also hold the token's type (TOKEN_TYPE_SHIFT)."""

    def __init__(
        self, vocab_size: int, num_types: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(vocab_size, hidden_size, dtype, device)
        self.types = new_parameter(num_types, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        ids = input_ids & ((1 << TOKEN_TYPE_SHIFT) - 1)
        # Kernels do not check that a row is within their table.
        types = (input_ids >> TOKEN_TYPE_SHIFT).clamp(max=len(self.types) - 1)
        return add_rows(super().forward(ids), self.types, types)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {**super().load_slots(), ("types", None): LoadSlot(self.types.data, tuple(self.types.shape))}


class ClassificationHead(nn.Module):
    """In float32 whatever the compute dtype: it is small, and its result is final."""

    takes_adapters: ClassVar[bool] = False  # whose terms are by the tokens of a step, and in the compute dtype

    def __init__(
        self, config: HeadConfig, hidden_size: int, labels: int, eps: float, norm_bias: bool, device: torch.device
    ) -> None:
        super().__init__()
        float32 = (torch.float32, device)
        self.dense = (
            ColumnParallelLinear(hidden_size, hidden_size, config.dense_bias, *float32) if config.dense else None
        )
        if config.activation not in HEAD_ACTIVATIONS:
            raise ValueError(f"the head's activation {config.activation!r} is none of: {', '.join(HEAD_ACTIVATIONS)}")
        self.activation = HEAD_ACTIVATIONS[config.activation]
        self.norm = LayerNorm(hidden_size, eps, norm_bias, device) if config.norm else None
        self.out = ColumnParallelLinear(hidden_size, labels, True, *float32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.float()
        if self.dense is not None:
            x = self.activation(self.dense(x))
        return self.out(x if self.norm is None else self.norm(x))


def with_legacy_norms(weights: WeightMap) -> WeightMap:
    """Also accept the names that the first checkpoints have for a norm's weight and bias."""
    old = {"weight": "gamma", "bias": "beta"}
    norms = [rule for rule in weights.rules if rule.checkpoint.endswith("LayerNorm.{p}")]
    named = (
        replace(rule, checkpoint=rule.checkpoint.replace("{p}", theirs), parameter=rule.parameter.replace("{p}", ours))
        for rule in norms
        for ours, theirs in old.items()
    )
    return weights.with_rules(*named)
