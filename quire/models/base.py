"""The interface between the engine and a model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from quire.attention.base import ForwardContext
from quire.layers.cache_layer import CacheLayer
from quire.messages.pooling_params import TOKEN_TYPE_SHIFT as TOKEN_TYPE_SHIFT
from quire.models.loading.weight_map import WeightNames

# Beside layers' numbers, a name for hidden states: what the model's last norm gives, which its head multiplies.
FINAL = "final"


class LanguageModel(Protocol):
    """A causal language model over paged attention, loaded and ready (`models/loading/loader.py`)."""

    num_parameters: int
    kernel_row_counts: tuple[int, ...]  # token counts at which kernels change; each range is compiled ahead

    @property
    def embed_tokens(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Ids [N] -> [N, hidden], the start of `forward`. Small steps on a CPU are recorded from there on and replayed;
        None: the model does not consist of our kernels alone, so steps cannot be recorded."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the model has embeddings for; None: no limit."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a step runs without the host, so that a CUDA graph can capture it."""
        ...

    def __call__(
        self,
        input_ids: torch.Tensor,  # [N]
        positions: torch.Tensor,  # [N]; [3, N] if it SupportsFeatures with three axes and a prompt has such positions
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,  # [N, hidden], instead of input_ids
    ) -> torch.Tensor:
        """Hidden states [N, hidden]."""
        ...

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]."""
        ...

    def cache_layers(self) -> Sequence[CacheLayer]:
        """Those with a part in the KV cache, ordered by layer_index."""
        ...

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """Inside, the model has one layer of each kind: layers of a kind differ only in weights, not in kernels."""
        ...

    def eval(self) -> Any: ...


@runtime_checkable
class WritesLastApart(Protocol):
    """A model whose last layer can be computed for some tokens of a step alone: those whose output someone reads."""

    def writes_last_apart(self) -> bool:
        """Whether it can as it is now: not while forward hooks would miss calls or tokens. Asked before such steps."""
        ...

    def last_group(self) -> int:
        """The KV-cache group of the last layer."""
        ...

    def forward_to_last(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As a call, up to the last layer's queries and residual stream; its keys and values are in the cache."""
        ...

    def forward_last(self, q: torch.Tensor, stream: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states of the tokens whose queries and stream these are, one a row of `ctx`, which has metadata of the
        last layer's group alone, and no slots."""
        ...


@runtime_checkable
class SupportsLoRA(Protocol):
    """A model whose layers take adapters (lora/adapters.py)."""

    def adapted_names(self) -> WeightNames:
        """Of its layers in adapters' files."""
        ...

    def is_elsewhere(self, name: str) -> bool:
        """Whether another worker's stage has this tensor of the checkpoint."""
        ...


@runtime_checkable
class SupportsFeatures(Protocol):
    """A model whose prompts may be more than token ids: embeddings, and what its encoders make embeddings of."""

    feature_kinds: tuple[str, ...]  # that `encode` accepts

    @property
    def hidden_size(self) -> int: ...

    @property
    def position_axes(self) -> int:
        """1, or 3: time, height and width."""
        ...

    @property
    def embeds_scale(self) -> float:
        """Of embeddings that a prompt brings, where the model multiplies these too."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, hidden], a new tensor: features are written over it."""
        ...

    def encode(self, kind: str, data: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Features of one kind, each as its prompt has it -> [its length, hidden] each."""
        ...


@runtime_checkable
class SupportsPooling(Protocol):
    """A model made for vectors or classes: what pooling reads of its class and of the loaded model."""

    is_pooling_model: ClassVar[bool]  # served with runner="pooling" unless the user says otherwise
    supports_generation: ClassVar[bool]
    default_pooling: ClassVar[str]  # where neither request nor checkpoint says: "CLS", "MEAN", "LAST"
    head_pooling: str | None  # the token that the head reads: "CLS", "MEAN", "LAST"; "ALL": each; None: it has no head
    num_labels: int  # 0: it has no head

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pooled by `head_pooling`, without any norm or activation: [n, hidden] -> logits [n, num_labels]."""
        ...
