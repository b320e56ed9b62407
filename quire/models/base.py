"""What the engine asks of a model, whoever wrote it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from quire.attention.base import ForwardContext
from quire.layers.attention import Attention


class LanguageModel(Protocol):
    """A causal language model over paged attention, loaded and ready (`models/loading/loader.py`)."""

    num_parameters: int
    kernel_row_counts: tuple[int, ...]  # numbers of tokens from which on other kernels serve; they are compiled ahead

    @property
    def embed_tokens(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Ids [N] -> [N, hidden], as `forward` begins. Small steps on a CPU are recorded behind it; None: the model is
        not made of our kernels alone, and there is nothing to record."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has embeddings for; None: any."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a step needs the host for nothing, so that a CUDA graph can hold it."""
        ...

    def __call__(
        self,
        input_ids: torch.Tensor,  # [N]
        positions: torch.Tensor,  # [N]
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,  # [N, hidden], instead of input_ids
        intermediate: dict[str, torch.Tensor] | None = None,  # from the pipeline stage before
    ) -> torch.Tensor:
        """Hidden states [N, hidden]."""
        ...

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab]."""
        ...

    def attention_layers(self) -> list[Attention]:
        """In the order of their layer_index."""
        ...

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """Inside, the model has one layer for each kind: what differs in kernels, but not in numbers."""
        ...

    def eval(self) -> Any: ...
