"""Token embedding and language-model head."""

import torch
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition, VocabMethod
from quire.quantization.unquantized import UnquantizedLinearMethod


class VocabEmbedding(nn.Module):
    """Token ids [N] -> [N, hidden]. Every worker holds all of it."""

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        method: VocabMethod | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.shape = (vocab_size, hidden_size)
        self.method = method or UnquantizedLinearMethod()
        self.method.create_weights(self, hidden_size, [vocab_size], dtype, device)
        self.scale = float(torch.tensor(scale, dtype=dtype))  # rounded, as models that have one were trained

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found = self.method.lookup(self, input_ids)
        return found if self.scale == 1.0 else found * self.scale

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return self.method.load_slots(self, [_whole(self.shape)])


class LMHead(nn.Module):
    """Hidden states [n, hidden] -> logits [n, vocab]. A tied head is the embedding's weight and loads nothing."""

    weight: nn.Parameter
    leaves_panels_only = True  # after loading, if the method does: see models/loading/packed_cache.py

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: VocabEmbedding | None = None,
        method: VocabMethod | None = None,
    ) -> None:
        super().__init__()
        self.shape = (vocab_size, hidden_size)
        self.tied = tied_to is not None
        self.method = method or UnquantizedLinearMethod()
        if tied_to is not None:
            self.method.share_weights(self, tied_to)
        else:
            self.method.create_weights(self, hidden_size, [vocab_size], dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, hidden, None)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {} if self.tied else self.method.load_slots(self, [_whole(self.shape)])

    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)


def _whole(shape: tuple[int, int]) -> Partition:
    return Partition(None, 0, shape[0], shape, 0, 0)
