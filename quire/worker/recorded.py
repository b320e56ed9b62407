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
from quire.models.base import LanguageModel, WritesLastApart

logger = logging.getLogger("quire")

MIN_SIZE, MAX_TOKENS = 256, 8192  # of recordings
OTHER_SIZE = 3  # of a second recording, which must consist of the same calls


@dataclass
class RecordedStep:
    """Fill the first rows of the inputs and run: the first rows of `results` are what it computes."""

    embeds: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    run: Replay
    results: tuple[torch.Tensor, ...]
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
        # With and without the terms of adapters; up to the last layer's queries, or all.
        self._recorded: dict[tuple[bool, bool], RecordedStep] = {}
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
        to_last: bool = False,
    ) -> tuple[torch.Tensor, ...] | None:
        """Hidden states of a step, valid until the next one, as are `streams`, which it sets; None if it cannot be
        replayed. `shared` as StepInputs.prefix_len, `embeds` as the model's inputs_embeds. `to_last`: the results of
        `forward_to_last` (models/base.py) instead."""
        tokens, count = len(inputs.input_ids), len(rows)
        adapted = self.lora is not None and self.lora.active
        if adapted not in self._replayable or tokens > MAX_TOKENS:
            return None
        if embeds is None:
            assert self.model.embed_tokens is not None
            embeds = self.model.embed_tokens(inputs.input_ids)
        kind = (adapted, to_last)
        if kind not in self._recorded or len(self._recorded[kind].ids) < tokens:
            try:
                self._recorded[kind] = self._record(embeds, to_last)
            except NotReplayableError as reason:
                self._replayable.discard(adapted)
                logger.debug("steps %s adapters are not replayed: %s", "with" if adapted else "without", reason)
                return None
        step = self._recorded[kind]
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
        return tuple(result[:tokens] for result in step.results)

    def _record(self, like: torch.Tensor, to_last: bool) -> RecordedStep:
        # A larger step than any before is recorded anew.
        size = max(MIN_SIZE, 1 << (len(like) - 1).bit_length())
        recording, step = self._record_size(like.new_zeros(size, like.shape[1]), to_last)
        other, _ = self._record_size(like.new_zeros(OTHER_SIZE, like.shape[1]), to_last)
        if [call.shape for call in recording.calls] != [call.shape for call in other.calls]:
            raise NotReplayableError("the calls depend on the number of tokens")
        return step

    def _record_size(self, embeds: torch.Tensor, to_last: bool) -> tuple[Recording, RecordedStep]:
        size = len(embeds)
        results: tuple[torch.Tensor, ...]
        rows, ids, positions, *slots = torch.zeros(3 + len(self.tables), size, dtype=torch.int64)
        starts, lens = torch.arange(size + 1, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        step = StepInputs(rows=rows, num_tokens=size, query_start=starts, seq_lens=lens, decode_only=True)
        metadata = self.backends.build(step, self.tables, self.sizes)
        ctx = ForwardContext(step, metadata, slots, None, streams=dict.fromkeys(self.stream_layers) or None)
        with Recording(size) as recording:
            if to_last:
                assert isinstance(self.model, WritesLastApart)
                results = self.model.forward_to_last(ids, positions, ctx, embeds)
            else:
                results = (self.model(ids, positions, ctx, inputs_embeds=embeds),)
        if recording.is_of_texts:
            run, hidden = recording.replayed_by_texts(starts, results[0])
            results = (hidden,)
        else:
            run = recording.replayed()
        return recording, RecordedStep(embeds, ids, rows, starts, lens, positions, slots, run, results, ctx)
