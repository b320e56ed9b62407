"""Forward passes of a proposer's layers, at positions that only the device knows."""

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.attention.base import ForwardContext
from quire.attention.group_backends import GroupBackends
from quire.attention.step_batch import StepBatch
from quire.kernels.append_drafts import append_drafts
from quire.kernels.dispatch import use_triton
from quire.kernels.prepare_inputs import PreparedInputs, prepare_inputs
from quire.kernels.sample_tokens import Draw, DrawParameters, sample_and_append, sample_tokens
from quire.kernels.transfer import aligned, write_to
from quire.worker.graphs import capture
from quire.worker.rows import RowState


class DraftRunner:
    """The rows as a proposal sees them: their tokens are the known ones and the drafts so far, of which the proposer's
    layers have computed some. A pass computes the next ones and advances `num_computed`; a draft that is appended
    advances `num_tokens`. The rows' own state advances by neither, only drafts lie in its token ids.

    `token_shift` 1 is for layers that read, at a position, the token after it: all indices are one less.
    """

    def __init__(self, state: RowState, backends: GroupBackends, last_position: int, token_shift: int = 0) -> None:
        self.state, self.backends, self.last_position = state, backends, last_position
        self.token_shift = token_shift
        self.token_ids = state.token_ids[:, token_shift:]
        rows, device = len(state.num_tokens), state.device
        self.counts = torch.zeros(2, aligned(rows, 8), dtype=torch.int64, device=device)
        self.num_tokens, self.num_computed = self.counts[:, :rows]
        self.collecting = False  # kernels are not launched: no value has a meaning
        self._drawn = torch.empty(rows, dtype=torch.int32, device=device)
        zeros = torch.zeros(rows, device=device)
        ints = zeros.int()
        self._greedy = DrawParameters(zeros.long(), zeros, zeros, zeros, ints, ints)

    def begin(self, num_new: int = 0) -> None:
        """A proposal: in every row the last `num_new` tokens are to be computed, up to the last that is known or, in a
        prompt, to the first that the step has not computed."""
        torch.sub(self.state.num_tokens, self.token_shift, out=self.num_tokens)
        torch.sub(self.state.num_computed, self.token_shift - 1 + num_new, out=self.num_computed)

    def begin_rows(self, rows: torch.Tensor, num_new: torch.Tensor) -> None:
        """The same with another number for each row; none is padding."""
        self.begin()
        self.num_computed.index_add_(0, rows.long(), num_new.long(), alpha=-1).clamp_(min=0)

    def prepare(self, batch: StepBatch) -> PreparedInputs:
        """Ids, positions and slots of the next tokens of rows, which count as computed from now on."""
        state = self.state
        inputs = prepare_inputs(
            batch.rows,
            batch.query_start,
            batch.token_rows,
            self.token_ids,
            self.num_computed,
            state.block_tables,
            state.block_sizes,
        )
        if self.collecting:
            inputs.input_ids.zero_()
            inputs.positions.zero_()
        # Drafts behind a row's limit are never accepted, but have to find a row in tables of positions. Their keys go
        # where the block table leads: to blocks of the row, or to the null block.
        inputs.positions.clamp_(max=self.last_position)
        return inputs

    def context(self, batch: StepBatch, inputs: PreparedInputs) -> ForwardContext:
        """For layers to compute what was prepared."""
        state = self.state
        return batch.context(inputs, inputs.positions, self.backends, state.block_tables, state.block_sizes)

    def likeliest(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, vocab] -> ids [n]."""
        if not use_triton(logits):
            return logits.float().argmax(dim=-1)  # of bf16 a CPU finds it three times slower
        return sample_tokens(logits, rows, self.num_tokens, self._greedy, Draw.GREEDY)

    def append_likeliest(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """The likeliest token of each row [n] by logits [n, vocab] is its next draft, if the layers have computed all
        tokens before; rows with more of a prompt to come get none."""
        sample_and_append(logits, rows, self, self._greedy, Draw.GREEDY, self._drawn[: len(rows)])

    def append(self, tokens: torch.Tensor, rows: torch.Tensor, to_target: torch.Tensor | None = None) -> None:
        """The same with tokens [n] that were chosen otherwise; `to_target` has the ids of a draft vocabulary."""
        append_drafts(tokens, rows, self, to_target)


class DraftGraphs:
    """Passes of a proposal as CUDA graphs, by numbers of rows and tokens per row. A proposal is padded to the smallest
    that fits."""

    def __init__(self, compute: Callable[[torch.Tensor, int], None], max_rows: int, device: torch.device) -> None:
        """compute(rows, tokens_per_row) launches them; 0 tokens per row: those after the first pass."""
        self._compute = compute
        self._rows = torch.full((aligned(max_rows),), -1, dtype=torch.int32, device=device)
        self._host = np.full(max_rows, -1, np.int32)
        self._row_counts: list[int] = []
        self._captured: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def capture(self, row_counts: Sequence[int], tokens_per_row: Sequence[int]) -> None:
        """Instead of those captured before."""
        self._captured.clear()
        self._row_counts = sorted(row_counts)
        if not row_counts:
            return
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._rows.device)
        self._rows.fill_(-1)  # padding only: no row's drafts change
        for count in sorted(tokens_per_row, reverse=True):
            for num_rows in reversed(self._row_counts):
                passes = functools.partial(self._compute, self._rows[:num_rows], count)
                self._captured[num_rows, count], _ = capture(passes, self._rows.device, stream, pool)

    def run(self, rows: np.ndarray, tokens_per_row: int) -> bool:
        """False if there is no graph for it."""
        at = bisect_left(self._row_counts, len(rows))
        key = (self._row_counts[at], tokens_per_row) if at < len(self._row_counts) else (0, 0)
        if key not in self._captured:
            return False
        self._host[: len(rows)], self._host[len(rows) : key[0]] = rows, -1
        write_to(self._rows, self._host[: key[0]])
        self._captured[key].replay()
        return True
