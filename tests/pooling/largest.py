"""A pooling method in one file: the largest value of each dimension over the prompt's tokens."""

from collections.abc import Sequence

import torch

from quire.pooling.methods import Chunk
from quire.pooling.registry import register_pooling_type


class Largest:
    def __init__(self) -> None:
        self.so_far: dict[int, torch.Tensor] = {}  # by row

    def pool(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        found = []
        for chunk in chunks:
            largest = hidden[chunk.first : chunk.first + chunk.count].float().amax(dim=0)
            if chunk.start:
                largest = torch.maximum(largest, self.so_far[chunk.row])
            self.so_far[chunk.row] = largest
            if chunk.is_last:
                found.append(largest)
        return torch.stack(found) if found else hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)

    def remove_row(self, row: int) -> None:
        self.so_far.pop(row, None)


def register() -> None:
    register_pooling_type("LARGEST", "tests.pooling.largest:Largest", whole_prompt=True)
