"""CPU steps recorded once and replayed by one C call: the analogue of CUDA graphs, for the layers of the model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import ForwardContext, StepInputs
from quire.attention.group_backends import GroupBackends
from quire.kernels.native.replay import NotReplayableError, Recording, Replay
from quire.kernels.prepare_inputs import PreparedInputs
from quire.lora.state import LoRAState
from quire.models.base import LanguageModel

logger = logging.getLogger("quire")

MIN_SIZE, MAX_TOKENS = 256, 8192  # of recordings
OTHER_SIZE = 3  # of a second recording, which must consist of the same calls


@dataclass
class RecordedStep:
    """Fill the first rows of the inputs and run: the first rows of `hidden` are the result."""

    embeds: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    run: Replay
    hidden: torch.Tensor
    ctx: ForwardContext  # keeps alive what the recorded calls point to


class RecordedSteps:
    def __init__(
        self,
        model: LanguageModel,
        backends: GroupBackends,
        tables: Sequence[torch.Tensor],
        sizes: list[int],
        lora: LoRAState | None = None,
        stream_layers: Sequence[int] = (),
    ) -> None:
        """`stream_layers`: keys of ForwardContext.streams."""
        self.model, self.backends, self.tables, self.sizes = model, backends, tables, sizes
        self.lora, self.stream_layers = lora, stream_layers
        self.replays = 0
        self._recorded: dict[bool, RecordedStep] = {}  # with and without the terms of adapters
        # A stage without an embedding starts from the stream of the one before.
        self._replayable = {False, True} if getattr(model, "embed_tokens", self) is not None else set()

    def run(
        self,
        rows: torch.Tensor,
        query_start: torch.Tensor,
        inputs: PreparedInputs,
        shared: int,
        streams: dict[int, torch.Tensor | None] | None = None,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Hidden states of a step, valid until the next one, as are `streams`, which it sets; None if it cannot be
        replayed. `shared` as StepInputs.prefix_len, `embeds` as the model's inputs_embeds."""
        tokens, count = len(inputs.input_ids), len(rows)
        adapted = self.lora is not None and self.lora.active
        if adapted not in self._replayable or tokens > MAX_TOKENS:
            return None
        if embeds is None:
            assert self.model.embed_tokens is not None
            embeds = self.model.embed_tokens(inputs.input_ids)
        if adapted not in self._recorded or len(self._recorded[adapted].ids) < tokens:
            try:
                self._recorded[adapted] = self._record(embeds)
            except NotReplayableError as reason:
                self._replayable.discard(adapted)
                logger.debug("steps %s adapters are not replayed: %s", "with" if adapted else "without", reason)
                return None
        step = self._recorded[adapted]
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
        for i, stream in (step.ctx.streams or {}).items():
            assert streams is not None and stream is not None
            streams[i] = stream[:tokens]
        return step.hidden[:tokens]

    def _record(self, like: torch.Tensor) -> RecordedStep:
        # A larger step than any before is recorded anew.
        size = max(MIN_SIZE, 1 << (len(like) - 1).bit_length())
        recording, step = self._record_size(like.new_zeros(size, like.shape[1]))
        other, _ = self._record_size(like.new_zeros(OTHER_SIZE, like.shape[1]))
        if [call.shape for call in recording.calls] != [call.shape for call in other.calls]:
            raise NotReplayableError("the calls depend on the number of tokens")
        return step

    def _record_size(self, embeds: torch.Tensor) -> tuple[Recording, RecordedStep]:
        size = len(embeds)
        rows, ids, positions, *slots = torch.zeros(3 + len(self.tables), size, dtype=torch.int64)
        starts, lens = torch.arange(size + 1, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        step = StepInputs(rows=rows, num_tokens=size, query_start=starts, seq_lens=lens, decode_only=True)
        metadata = self.backends.build(step, self.tables, self.sizes)
        ctx = ForwardContext(step, metadata, slots, None, streams=dict.fromkeys(self.stream_layers) or None)
        with Recording(size) as recording:
            hidden = self.model(ids, positions, ctx, inputs_embeds=embeds)
        if recording.is_of_texts:
            run, hidden = recording.replayed_by_texts(starts, hidden)
        else:
            run = recording.replayed()
        return recording, RecordedStep(embeds, ids, rows, starts, lens, positions, slots, run, hidden, ctx)
