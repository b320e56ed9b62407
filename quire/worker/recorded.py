"""Small steps on a CPU, replayed: the analogue of a GPU's graphs, for the layers of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import AttentionBackend, ForwardContext, StepInputs
from quire.kernels.native.replay import Recording, Replay
from quire.kernels.prepare_inputs import PreparedInputs
from quire.models.base import LanguageModel

MAX_TOKENS = 256  # with more, Python's share is small


@dataclass
class Recorded:
    """Fill the first rows of the inputs, run, and those of `hidden` hold the result."""

    embeds: torch.Tensor
    rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    run: Replay
    hidden: torch.Tensor
    kept: ForwardContext  # the calls have addresses of what is in there


class RecordedSteps:
    def __init__(
        self, model: LanguageModel, backend: AttentionBackend, tables: Sequence[torch.Tensor], sizes: list[int]
    ):
        self.model, self.backend, self.tables, self.sizes = model, backend, tables, sizes
        self.replays = 0
        self._recorded: Recorded | None = None
        self._possible = backend.name == "native" and model.embed_tokens is not None

    def run(
        self, rows: torch.Tensor, query_start: torch.Tensor, inputs: PreparedInputs, shared: int
    ) -> torch.Tensor | None:
        """Hidden states of a step, until the next one; or None: run the model. `shared` as StepInputs.prefix_len."""
        tokens, count = len(inputs.input_ids), len(rows)
        if not self._possible or tokens > MAX_TOKENS:
            return None
        assert self.model.embed_tokens is not None
        embeds = self.model.embed_tokens(inputs.input_ids)
        step = self._recorded
        if step is None:
            step = self._recorded = self._record(embeds.new_zeros(MAX_TOKENS, embeds.shape[1]))
        if step is None:
            self._possible = False
            return None
        step.embeds[:tokens].copy_(embeds)
        step.positions[:tokens].copy_(inputs.positions)
        for place, slots in zip(step.slots, inputs.slot_mapping, strict=True):
            place[:tokens].copy_(slots)
        step.rows[:count].copy_(rows)
        step.query_start[: count + 1].copy_(query_start[: count + 1])
        step.seq_lens[:count].copy_(inputs.seq_lens)
        step.run(tokens, count, shared)
        self.replays += 1
        return step.hidden[:tokens]

    def _record(self, embeds: torch.Tensor) -> Recorded | None:
        size = len(embeds)
        rows, positions, *slots = torch.zeros(2 + len(self.tables), size, dtype=torch.int64)
        starts, lens = torch.arange(size + 1, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        step = StepInputs(rows=rows, num_tokens=size, query_start=starts, seq_lens=lens, one_each=True)
        metadata = [self.backend.build(step, table, unit) for table, unit in zip(self.tables, self.sizes, strict=True)]
        ctx = ForwardContext(step, metadata, slots, None)
        with Recording(size) as recording:
            hidden = self.model(positions, positions, ctx, inputs_embeds=embeds)
        if not recording.faithful:
            return None
        return Recorded(embeds, rows, starts, lens, positions, slots, recording.replayed(), hidden, ctx)
