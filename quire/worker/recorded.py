"""Small steps on a CPU, replayed: the analogue of a GPU's graphs, for the layers of the model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import AttentionBackend, ForwardContext, StepInputs
from quire.kernels.native.replay import NotReplayableError, Recording, Replay
from quire.kernels.prepare_inputs import PreparedInputs
from quire.models.base import LanguageModel

logger = logging.getLogger("quire")

MAX_TOKENS = 256  # with more, Python's share is small
OTHER_SIZE = 3  # whose calls must be the same


@dataclass
class Recorded:
    """Fill the first rows of the inputs, run, and those of `hidden` hold the result."""

    embeds: torch.Tensor
    ids: torch.Tensor
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
        self._possible = model.embed_tokens is not None

    def run(
        self, rows: torch.Tensor, query_start: torch.Tensor, inputs: PreparedInputs, shared: int
    ) -> torch.Tensor | None:
        """Hidden states of a step, until the next one; or None: run the model. `shared` as StepInputs.prefix_len."""
        tokens, count = len(inputs.input_ids), len(rows)
        if not self._possible or tokens > MAX_TOKENS:
            return None
        assert self.model.embed_tokens is not None
        embeds = self.model.embed_tokens(inputs.input_ids)
        if self._recorded is None:
            try:
                self._recorded = self._record(embeds)
            except NotReplayableError as reason:
                self._possible = False
                logger.debug("steps are not replayed: %s", reason)
                return None
        step = self._recorded
        step.embeds[:tokens].copy_(embeds)
        step.ids[:tokens].copy_(inputs.input_ids)
        step.positions[:tokens].copy_(inputs.positions)
        for place, slots in zip(step.slots, inputs.slot_mapping, strict=True):
            place[:tokens].copy_(slots)
        step.rows[:count].copy_(rows)
        step.query_start[: count + 1].copy_(query_start[: count + 1])
        step.seq_lens[:count].copy_(inputs.seq_lens)
        step.run(tokens, count, shared)
        self.replays += 1
        return step.hidden[:tokens]

    def _record(self, like: torch.Tensor) -> Recorded:
        recording, step = self._noted(like.new_zeros(MAX_TOKENS, like.shape[1]))
        other, _ = self._noted(like.new_zeros(OTHER_SIZE, like.shape[1]))
        if [call.shape for call in recording.calls] != [call.shape for call in other.calls]:
            raise NotReplayableError("the calls depend on the number of tokens")
        return step

    def _noted(self, embeds: torch.Tensor) -> tuple[Recording, Recorded]:
        size = len(embeds)
        rows, ids, positions, *slots = torch.zeros(3 + len(self.tables), size, dtype=torch.int64)
        starts, lens = torch.arange(size + 1, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        step = StepInputs(rows=rows, num_tokens=size, query_start=starts, seq_lens=lens, one_each=True)
        metadata = [self.backend.build(step, table, unit) for table, unit in zip(self.tables, self.sizes, strict=True)]
        ctx = ForwardContext(step, metadata, slots, None)
        with Recording(size) as recording:
            hidden = self.model(ids, positions, ctx, inputs_embeds=embeds)
        run = recording.replayed()
        return recording, Recorded(embeds, ids, rows, starts, lens, positions, slots, run, hidden, ctx)
