"""Decode steps of few rows on a CPU, replayed: the analogue of a GPU's graphs, for the layers of the model."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import AttentionBackend, ForwardContext, StepInputs
from quire.kernels.native.replay import Recording
from quire.kernels.prepare_inputs import PreparedInputs
from quire.models.base import LanguageModel

MAX_ROWS = 64  # with more, Python's share is small
MAX_BYTES = 128 << 20  # a recording keeps all activations of its step
SEEN_BEFORE = 3  # steps of a size before it is worth recording


@dataclass
class Recorded:
    """A step of so many rows: fill the inputs, run, and `hidden` holds the result."""

    embeds: torch.Tensor
    inputs: list[torch.Tensor]  # positions, rows, seq_lens, and slots of each group
    run: Callable[[], None]
    hidden: torch.Tensor


class RecordedSteps:
    def __init__(
        self, model: LanguageModel, backend: AttentionBackend, tables: Sequence[torch.Tensor], sizes: list[int]
    ):
        self.model, self.backend, self.tables, self.sizes = model, backend, tables, sizes
        self._steps: dict[int, Recorded] = {}
        self._seen: Counter[int] = Counter()
        self._possible = backend.name == "native" and model.embed_tokens is not None
        self._bytes = 0

    def run(self, rows: torch.Tensor, inputs: PreparedInputs) -> torch.Tensor | None:
        """Hidden states of a step of one token each, or None: run the model."""
        count = len(rows)
        if not self._possible or count > MAX_ROWS:
            return None
        step = self._steps.get(count)
        if step is None:
            self._seen[count] += 1
            if self._seen[count] < SEEN_BEFORE or self._bytes > MAX_BYTES:
                return None
        assert self.model.embed_tokens is not None
        embeds = self.model.embed_tokens(inputs.input_ids)
        fresh = [inputs.positions, rows, inputs.seq_lens, *inputs.slot_mapping]
        if step is None:
            return self._record(count, embeds, fresh)
        step.embeds.copy_(embeds)
        for place, value in zip(step.inputs, fresh, strict=True):
            place.copy_(value)
        step.run()
        return step.hidden

    def _record(self, count: int, embeds: torch.Tensor, fresh: list[torch.Tensor]) -> torch.Tensor:
        """Runs it, too."""
        inputs = [fresh[0].long().clone(), fresh[1].long().clone(), fresh[2].int().clone()]
        inputs += [slots.long().clone() for slots in fresh[3:]]
        positions, rows, seq_lens, *slots = inputs
        starts = torch.arange(count + 1, dtype=torch.int32)
        step = StepInputs(rows=rows, num_tokens=count, query_start=starts, seq_lens=seq_lens, one_each=True)
        metadata = [self.backend.build(step, table, size) for table, size in zip(self.tables, self.sizes, strict=True)]
        ctx = ForwardContext(step, metadata, slots, None)
        kept = embeds.clone()
        with Recording() as recording:
            hidden = self.model(positions, positions, ctx, inputs_embeds=kept)
        self._possible = recording.faithful
        if self._possible:
            self._bytes += sum(tensor.nbytes for tensor in recording.tensors)
            recording.tensors += [ctx, starts]
            self._steps[count] = Recorded(kept, inputs, recording.replayed(), hidden)
        return hidden
