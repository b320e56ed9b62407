"""Chains of drafts by a head that continues the target's hidden states."""

from collections.abc import Sequence
from typing import cast

import torch

from quire.attention.base import ForwardContext
from quire.attention.group_backends import GroupBackends
from quire.attention.step_batch import StepBatch
from quire.config import EngineConfig
from quire.layers.cache_layer import CacheLayer
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.draft_head import DraftHead
from quire.models.options import ModelOptions
from quire.spec_decode.draft_runner import DraftGraphs, DraftRunner
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.worker.recorded import MIN_SIZE, OTHER_SIZE, RecordedSteps
from quire.worker.rows import RowState

CARRIED = 0  # its place among the streams of a recorded pass


class ReplayableHead:
    """A head as recorded passes call it: hidden states are read from one address, and those that the next pass
    continues are a stream."""

    def __init__(self, head: DraftHead, dtype: torch.dtype) -> None:
        self.head = head
        self.embed_tokens = head.embed
        sizes = (MIN_SIZE, OTHER_SIZE)  # which are recorded
        self.hidden = {size: torch.zeros(size, head.config.hidden_size, dtype=dtype) for size in sizes}

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext, inputs_embeds: torch.Tensor
    ) -> torch.Tensor:
        assert ctx.streams is not None
        out, ctx.streams[CARRIED] = self.head(inputs_embeds, self.hidden[len(inputs_embeds)], positions, ctx)
        return out


class HeadProposer(Proposer):
    """After a step the head computes the positions that the step did; then a pass for each draft after the first, which
    continues the hidden states of the one before."""

    head: DraftHead
    agrees = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.config, self.device = config, device
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)

    def load(self, model: DecoderModel, options: ModelOptions) -> DraftHead:
        """The head of a target that is loaded."""
        raise NotImplementedError

    def prepare(self, model: LanguageModel) -> None:
        self.hidden_outputs = DraftHead.hidden_outputs
        if not isinstance(model, DecoderModel):
            return  # the worker refuses it, for its hidden states
        length = self.config.model.max_model_len or self.config.model.derived_max_model_len
        self.head = self.load(model, ModelOptions(self.dtype, self.device, self.tp, max_model_len=length)).eval()
        self.hidden_outputs = self.head.hidden_outputs
        self.input_width = len(self.hidden_outputs) * model.hidden_size

    def cache_layers(self) -> Sequence[CacheLayer]:
        return self.head.cache_layers()

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        rows = len(state.num_tokens)
        self.runner = DraftRunner(state, backends, last_position, token_shift=1)
        self.graphs = DraftGraphs(self._compute, rows, self.device)
        # Inputs of captured passes, beside the hidden states: by place in the plan.
        self._num_sampled = torch.zeros(rows, dtype=torch.int32, device=self.device)
        width = self.head.config.hidden_size
        self._carried = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        self.recorded: RecordedSteps | None = None
        if backends.supports_replay:
            self._replayable = ReplayableHead(self.head, self.dtype)
            model = cast(LanguageModel, self._replayable)
            self.recorded = RecordedSteps(model, backends, state.block_tables, state.block_sizes, None, (CARRIED,))

    def propose(self, step: DraftStep) -> None:
        plan, rows = step.plan, step.rows[: len(step.plan.rows)]
        assert plan.num_drafts is not None and step.hidden is not None and step.num_sampled is not None
        count = int(plan.num_tokens[0])
        if (plan.num_tokens == count).all() and (plan.num_drafts == count - 1).all():
            self._num_sampled[: len(rows)].copy_(step.num_sampled)
            if self.graphs.run(plan.rows, count):
                return
        more = (step.first_logits,)
        batch, (first,) = StepBatch.planned(plan.rows, plan.num_tokens, self.runner.backends, self.device, more)
        last = (first + step.num_sampled - 1).clamp(min=0)
        self._carried[: len(rows)].copy_(self._first_pass(batch, step.hidden, last.long()))
        if not self.graphs.run(plan.rows, 0):
            self._compute(rows, 0)

    def _compute(self, rows: torch.Tensor, tokens_per_row: int) -> None:
        """All passes of a proposal after a step of as many tokens in each row, or, if that is 0, those after the
        first. Nothing of it depends on the host, so it can be captured."""
        n, count = len(rows), tokens_per_row
        carried = self._carried[:n]
        if count:
            assert self.hidden is not None and self.hidden.states is not None
            first = torch.arange(n, device=rows.device) * count
            last = first + (self._num_sampled[:n] - 1).clamp(0, count - 1)
            carried = self._first_pass(StepBatch.of_equal(rows, count), self.hidden.states[: n * count], last.long())
        batch = StepBatch.of_equal(rows, 1)
        for _ in range(self.num_drafts - 1):
            out, carried = self._forward(batch, carried)
            self._append(out, rows)

    def _first_pass(self, batch: StepBatch, hidden: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Over all positions of the target's step, with its hidden states [N, width]; tokens `last` [n], the last that
        is right in each row, give the first draft. The hidden states that the next pass continues. What lies behind
        `last` was computed from drafts that were not accepted: the next step computes it again."""
        runner = self.runner
        assert self.hidden is not None
        runner.begin()
        runner.num_computed.copy_(self.hidden.first_positions)
        out, carried = self._forward(batch, self.head.combine(hidden))
        # A row that decodes has computed all but its last token, at whose position the next pass is.
        runner.num_computed.copy_(runner.state.num_computed)
        self._append(out[last], batch.rows)
        return carried[last]

    def _forward(self, batch: StepBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of rows through the head."""
        inputs = self.runner.prepare(batch)
        if self.recorded is not None and len(hidden) <= MIN_SIZE:
            self._replayable.hidden[MIN_SIZE][: len(hidden)].copy_(hidden)
            streams: dict[int, torch.Tensor | None] = {}
            out = self.recorded.run(batch.rows, batch.query_start, inputs, 0, streams)
            carried = streams.get(CARRIED)
            if out is not None and carried is not None:
                return out[0], carried
        ctx = self.runner.context(batch, inputs)
        found: tuple[torch.Tensor, torch.Tensor] = self.head(
            self.head.embed(inputs.input_ids), hidden, inputs.positions, ctx
        )
        return found

    def _append(self, hidden_rows: torch.Tensor, rows: torch.Tensor) -> None:
        tokens = self.runner.likeliest(self.head.compute_logits(hidden_rows), rows)
        self.runner.append(tokens, rows, self.head.to_target)

    def launch_kernels(self, row_counts: Sequence[int], max_tokens: int) -> None:
        self.runner.collecting = True
        self.run_padding(min(16, max_tokens))
        for num_rows in row_counts:
            rows = torch.full((num_rows,), -1, dtype=torch.int32, device=self.device)
            for count in (1, 1 + self.num_drafts):
                self._compute(rows, count)
        self.runner.collecting = False

    def run_padding(self, num_tokens: int) -> None:
        num_rows = min(num_tokens, len(self.runner.num_tokens))
        batch = StepBatch.padding(num_rows, num_tokens, self.runner.backends, self.device)
        hidden = self._carried.new_zeros(num_tokens, self.input_width)
        self._first_pass(batch, hidden, batch.query_start[1:].long() - 1)

    def capture_graphs(self, row_counts: Sequence[int]) -> None:
        self.graphs.capture(row_counts, (1 + self.num_drafts, 1, 0))
