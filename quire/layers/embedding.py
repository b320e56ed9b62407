"""Token embedding and language-model head, whose vocabulary is split among workers."""

import torch
import torch.nn.functional as F
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import LinearMethod, Partition, VocabMethod
from quire.quantization.unquantized import UnquantizedLinearMethod


class VocabEmbedding(nn.Module):
    """Token ids [N] -> [N, hidden]. A worker looks up the ids of its rows; the sum over workers is the result."""

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        method: VocabMethod | None = None,
        scale: float = 1.0,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.tp, self.rows = tp, _rows(vocab_size, hidden_size, tp)
        self.method = method or UnquantizedLinearMethod()
        self.method.create_weights(self, hidden_size, [self.rows.size], dtype, device)
        self.scale = float(torch.tensor(scale, dtype=dtype))  # rounded, as models that have one were trained

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found = self.method.lookup(self, input_ids) if self.tp.size == 1 else self._lookup_share(input_ids)
        return found if self.scale == 1.0 else found * self.scale

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return self.method.load_slots(self, [self.rows])

    def _lookup_share(self, input_ids: torch.Tensor) -> torch.Tensor:
        local = input_ids - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.size)
        found = self.method.lookup(self, local.masked_fill(elsewhere, 0))
        return self.tp.all_reduce(found.masked_fill(elsewhere[:, None], 0.0))


class LMHead(nn.Module):
    """Hidden states [n, hidden] -> logits [n, vocab], the same on all workers. A tied head is the embedding's
    weight and loads nothing."""

    weight: nn.Parameter
    leaves_panels_only = True  # after loading, if the method does: see models/loading/packed_cache.py

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: VocabEmbedding | None = None,
        method: LinearMethod | None = None,  # of a tied head a VocabMethod
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.tp, self.rows = tp, _rows(vocab_size, hidden_size, tp)
        self.tied = tied_to is not None
        self.method: LinearMethod = method or UnquantizedLinearMethod()
        if tied_to is not None:
            self.method.share_weights(self, tied_to)  # type: ignore[attr-defined]
        else:
            self.method.create_weights(self, hidden_size, [self.rows.size], dtype, device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.method.apply(self, hidden, None)
        return logits if self.tp.size == 1 else self._gathered(logits)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {} if self.tied else self.method.load_slots(self, [self.rows])

    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        vocab_size = self.rows.full_shape[0]
        share = -(-vocab_size // self.tp.size)  # the last rank may have fewer, but tensors of one shape are gathered
        everyones = self.tp.all_gather(F.pad(logits, (0, share - self.rows.size)))
        return everyones[:, :vocab_size].contiguous()


def _rows(vocab_size: int, hidden_size: int, tp: TensorParallel) -> Partition:
    first, count = tp.share_of_rows(vocab_size, "vocabulary")
    return Partition(None, 0, count, (vocab_size, hidden_size), 0, first)
