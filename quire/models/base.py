"""The interface between the engine and a model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from quire.attention.base import ForwardContext
from quire.layers.cache_layer import CacheLayer


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
        positions: torch.Tensor,  # [N]
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
