"""Which ranks of a world share what: tensor-parallel ranks are neighbours, then come stages, then copies."""

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Of a rank: its number among the copies of the model, among the stages, and among those that share layers."""

    data: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class WorldLayout:
    tensor: int = 1
    stages: int = 1
    data: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.stages * self.data

    def place(self, rank: int) -> Place:
        return Place(rank // (self.tensor * self.stages), rank // self.tensor % self.stages, rank % self.tensor)

    def rank(self, place: Place) -> int:
        return (place.data * self.stages + place.stage) * self.tensor + place.tensor

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Those that share every layer of a stage."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(tensor=i)) for i in range(self.tensor))

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """Those that hidden states pass through, first stage first."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(stage=i)) for i in range(self.stages))

    def model_ranks(self, rank: int) -> tuple[int, ...]:
        """Those of one copy of the model, which run the same plans."""
        first = self.rank(Place(self.place(rank).data, 0, 0))
        return tuple(range(first, first + self.tensor * self.stages))

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """Those with the same weights in the copies of the model."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(data=i)) for i in range(self.data))

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """Those of a stage in all copies, among which experts can be divided."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(data=i, tensor=j)) for i in range(self.data) for j in range(self.tensor))
