"""A checkpoint in memory, and a tiny runner: rows with block tables, stepped by hand."""

from dataclasses import dataclass, field
from typing import Any

import torch

from quire.attention.base import CacheBackend, ForwardContext, StepInputs
from quire.attention.indexed import TorchIndexedBackend
from quire.attention.latent import TorchLatentBackend
from quire.attention.torch import TorchBackend
from quire.messages.kv_cache import KVCacheSpec, LatentSpec
from quire.models.decoder import DecoderModel
from quire.models.loading.weight_loader import load_weights
from quire.models.options import ModelOptions
from quire.models.registry import model_class

CPU = torch.device("cpu")


@dataclass
class MemoryTensor:
    name: str
    data: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self.data)


def tensors_of(reference: Any) -> list[MemoryTensor]:
    return [MemoryTensor(name, data) for name, data in reference.state_dict().items()]


def ours_from(reference: Any, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """Our model with the weights of a transformers model."""
    hf = reference.config.to_dict()
    hf["architectures"] = [type(reference).__name__]
    model = model_class(hf)(hf, ModelOptions(dtype, CPU))
    load_weights(model, tensors_of(reference))
    model.process_after_loading()
    return model.eval()


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)  # in the cache
    blocks: list[int] = field(default_factory=list)


def torch_backend(spec: KVCacheSpec) -> CacheBackend:
    if not isinstance(spec, LatentSpec):
        return TorchBackend()
    return TorchIndexedBackend() if spec.index_size else TorchLatentBackend()


class TinyRunner:
    """One KV-cache group per distinct window, each with its own block ids, as the real runner does."""

    def __init__(
        self,
        model: DecoderModel,
        num_rows: int,
        block_size: int = 4,
        max_blocks: int = 16,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        num_blocks = num_rows * max_blocks + 1
        attentions = model.cache_layers()
        windows = list(dict.fromkeys(getattr(a, "sliding_window", None) for a in attentions))
        for a in attentions:
            dtype = dtype or next(model.parameters()).dtype
            spec = a.kv_cache_spec(block_size, dtype)
            self.backend = torch_backend(spec)
            views = [torch.zeros(num_blocks, *part.shape, dtype=dtype) for part in spec.parts()]
            a.bind(views, windows.index(getattr(a, "sliding_window", None)), self.backend)
        # Blocks in no order, different in every group.
        self.tables = [(torch.randperm(num_blocks - 1) + 1).view(num_rows, max_blocks).int() for _ in windows]
        self.lens = [0] * num_rows

    def step(self, batch: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """(row, new tokens) of this step -> logits [tokens, vocab] of each."""
        rows = [row for row, _ in batch]
        counts = [len(tokens) for _, tokens in batch]
        positions = [p for row, new in batch for p in range(self.lens[row], self.lens[row] + len(new))]
        for row, new in batch:
            self.lens[row] += len(new)
        seq_lens = [self.lens[row] for row in rows]
        query_start = torch.tensor([0, *counts]).cumsum(0).int()
        step = StepInputs(
            torch.tensor(rows), sum(counts), query_start, torch.tensor(seq_lens).int(), decode_only=max(counts) == 1
        )
        slots, metadata = [], []
        row_of_token = torch.tensor(rows).repeat_interleave(torch.tensor(counts))
        at = torch.tensor(positions)
        for table in self.tables:
            blocks = table[row_of_token, at // self.block_size].long()
            slots.append(blocks * self.block_size + at % self.block_size)
            metadata.append(self.backend.build(step, table, self.block_size))
        ids = torch.tensor([t for _, new in batch for t in new])
        with torch.inference_mode():
            hidden = self.model(ids, at, ForwardContext(step, metadata, slots))
            return list(self.model.compute_logits(hidden).split(counts))
