"""Which tensor- and pipeline-parallel sizes a model allows, and why others are not."""

from dataclasses import dataclass
from itertools import accumulate

from quire.planning.shape import ModelShape
from quire.planning.weight_format import WeightFormat


@dataclass(frozen=True)
class Layout:
    """Ranks of one copy of a model: `tensor` share every layer, `stages` have layers of their own."""

    tensor: int = 1
    stages: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages

    @property
    def flags(self) -> str:
        given = {"-tp": self.tensor, "-pp": self.stages}
        return " ".join(f"{name} {size}" for name, size in given.items() if size > 1)


SINGLE = Layout()


def tensor_obstacle(shape: ModelShape, weights: WeightFormat, size: int) -> str | None:
    """Why `size` ranks cannot share the layers; None: they can."""
    if size == 1:
        return None
    if shape.heads % size:
        return f"{shape.heads} attention heads cannot be divided by {size}"
    if shape.kv_heads >= size and shape.kv_heads % size:
        return f"{shape.kv_heads} KV heads cannot be divided by {size}"
    if shape.kv_heads < size and size % shape.kv_heads:
        return f"{shape.kv_heads} KV heads cannot be repeated equally on {size} ranks"
    for what, total, quantized in _widths(shape, weights):
        if total % size:
            return f"{what} of {total} cannot be divided by {size}"
        if quantized and total // size % weights.group:
            return f"{what} of {total} gives each of {size} ranks no whole groups of {weights.group} ({weights.name})"
    return None


def _widths(shape: ModelShape, weights: WeightFormat) -> list[tuple[str, int, bool]]:
    """What is divided among ranks as inputs of a linear, and whether its weights are quantized."""
    dense = not weights.experts_only
    found = [("attention output", shape.attention_outputs, dense)]
    if not all(shape.sparse):
        found.append(("intermediate size", shape.width, dense))
    if shape.experts is not None and any(shape.sparse):
        found.append(("experts' intermediate size", shape.experts.width, True))
        if shape.experts.shared_width:
            found.append(("shared expert's intermediate size", shape.experts.shared_width, dense))
    return found


def stage_obstacle(shape: ModelShape, stages: int) -> str | None:
    return f"{shape.num_layers} layers make at most {shape.num_layers} stages" if stages > shape.num_layers else None


def stage_ranges(num_layers: int, stages: int) -> list[range]:
    """Layers of each stage, as evenly as possible: the last, which has the head, and then the first get fewer."""
    counts = [num_layers // stages] * stages
    for i in [*range(1, stages - 1), 0, stages - 1][: num_layers % stages]:
        counts[i] += 1
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def legal_layouts(shape: ModelShape, weights: WeightFormat, most: int) -> list[Layout]:
    """With at most `most` ranks."""
    return [
        Layout(tensor, stages)
        for tensor in range(1, most + 1)
        if tensor_obstacle(shape, weights, tensor) is None
        for stages in range(1, most // tensor + 1)
        if stage_obstacle(shape, stages) is None
    ]
