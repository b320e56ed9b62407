import torch
import torch.nn.functional as F
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.quantization.base import LinearMethod
from quire.quantization.unquantized import UnquantizedLinearMethod


class VocabEmbedding(nn.Module):
    """Token ids [N] -> [N, hidden]. Every worker holds all of it."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {("weight", None): LoadSlot(self.weight.data, tuple(self.weight.shape))}


class LMHead(nn.Module):
    """Hidden states [n, hidden] -> logits [n, vocab]. A tied head is the embedding's weight and loads nothing."""

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: VocabEmbedding | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.method = method or UnquantizedLinearMethod()
        if tied_to is not None:
            self.weight = tied_to.weight
        else:
            self.method.create_weights(self, hidden_size, [vocab_size], dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, hidden, None)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {} if self.tied else {("weight", None): LoadSlot(self.weight.data, tuple(self.weight.shape))}

    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)
