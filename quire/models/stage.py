"""A stage of a pipeline: the layers that one worker has of a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Stage:
    """The first embeds tokens; the others start from the residual stream of the one before; the last has the head."""

    index: int = 0
    count: int = 1
    split: tuple[int, ...] | None = None  # layers of each stage; None: evenly

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """Numbers of this stage's layers among `total`."""
        sizes = split_layers(total, self.count) if self.split is None else self.split
        if len(sizes) != self.count or sum(sizes) != total or min(sizes) < 1:
            raise ValueError(
                f"layers are split as {','.join(map(str, sizes))}; needed are {self.count} positive numbers, one for "
                f"each stage, whose sum is the model's number of layers, {total}"
            )
        first = sum(sizes[: self.index])
        return range(first, first + sizes[self.index])


WHOLE = Stage()


def split_layers(total: int, stages: int) -> Sequence[int]:
    """As evenly as possible: the last stage, which has the head, and then the first get fewer."""
    if total < stages:
        raise ValueError(
            f"a model of {total} layers cannot be split into {stages} stages; use at most {total} "
            "(--pipeline-parallel-size)"
        )
    sizes = [total // stages] * stages
    middle = [*range(1, stages - 1), 0, stages - 1]
    for i in middle[: total % stages]:
        sizes[i] += 1
    return sizes


class LayerList(nn.ModuleList):
    """Layers under their numbers in the whole model: a stage's parameters have the names that they have there."""

    def __init__(self, numbers: Iterable[int], layers: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, layer in zip(numbers, layers, strict=True):
            self.add_module(str(number), layer)
