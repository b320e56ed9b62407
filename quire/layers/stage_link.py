"""A worker's links in a pipeline: the residual stream from the stage before to the one after, and the tokens that the
last stage samples to all before it."""

from collections import deque
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.distributed.world import World
from quire.kernels.transfer import to_device
from quire.messages.plan import SchedulerOutput

POOLS = 1 << 62  # known tokens of a row for which nothing is sampled
# Of proposers that read the target's layers or embedding, which other stages have.
READS_TARGET = ("eagle", "eagle3", "medusa", "mtp")


class TokenState(Protocol):
    """What rows have on a device (worker/rows.py)."""

    token_ids: torch.Tensor  # [rows, max_model_len or more] int32
    num_tokens: torch.Tensor  # [rows] int64
    num_computed: torch.Tensor  # [rows] int64


@runtime_checkable
class HasHiddenSize(Protocol):
    @property
    def hidden_size(self) -> int: ...


def check_stages(config: EngineConfig, world: World) -> None:
    """ValueError for what does not work with several stages yet."""
    if world.layout.stages == 1:
        return
    asked = {
        f"drafts by {config.speculative.method}": config.speculative.method in READS_TARGET,
        "KV connectors": bool(config.transfer.connectors),
    }
    refused = [name for name, wanted in asked.items() if wanted]
    if refused:
        raise ValueError(
            f"{' and '.join(refused)} cannot be used with several stages yet; leave it out, or use one stage "
            "(--pipeline-parallel-size 1) and more tensor-parallel workers (--tensor-parallel-size)"
        )


class OneStage:
    """Of a model that is not split: nothing is sent."""

    is_first = is_last = True

    def begin(self, plan: SchedulerOutput, state: TokenState) -> None:
        """Before a plan's changes are applied: its rows get the tokens that were sampled for them by now."""

    def stream(self, num_tokens: int) -> torch.Tensor | None:
        """[num_tokens, hidden], where `receive` puts it; None on the first stage."""
        return None

    def receive(self) -> None:
        """The stream of the plan at hand."""

    def send(self, stream: torch.Tensor) -> bool:
        """Whether it goes to another stage, and not to the head. [as many tokens as the plan has or more, hidden]; may
        be overwritten then."""
        return False

    def hand_back(self) -> None:
        """What the last stage has sampled, and its drafts for the next step, to all others."""

    def abandon(self) -> None:
        """The plan at hand has failed here. The other stages do not know, and must not wait: its requests end, and all
        others compute again."""


ONE_STAGE = OneStage()


def link_stages(
    config: EngineConfig, world: World, model: object, dtype: torch.dtype, device: torch.device
) -> OneStage:
    """With a buffer for the largest step."""
    if world.layout.stages == 1:
        return ONE_STAGE
    max_rows, max_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    assert max_rows is not None and max_tokens is not None and isinstance(model, HasHiddenSize)
    tokens = world.tokens if world.tokens.size > 1 else world.stages
    num_drafts = config.speculative.num_drafts
    sizes = (max_rows, max(max_rows * (1 + num_drafts), max_tokens), num_drafts, model.hidden_size)
    return StageLink(world.stages, tokens, *sizes, dtype, device)


class StageLink(OneStage):
    """Every stage gets every plan, in the same order, and from it alone knows the sizes of what it receives."""

    def __init__(
        self,
        stages: Group,
        tokens: Group,
        max_rows: int,
        max_tokens: int,
        num_drafts: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`tokens`: the same ranks as `stages`, for sampled tokens, so that neither waits for the other."""
        self._stages, self._tokens, self._device = stages, tokens, device
        self.is_first, self.is_last = stages.rank == 0, stages.rank == stages.size - 1
        # At one address, as recorded and captured steps need it.
        self._inbox = None if self.is_first else torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device)
        self._like = torch.zeros(0, hidden_size, dtype=dtype, device=device)
        # How many a row may get, and drafts behind them.
        self._offsets = torch.arange(1 + 2 * num_drafts, device=device)
        # As the host counts them. Of a row that decodes both are too low, for drafts may be accepted.
        self._num_known = np.zeros(max_rows, np.int64)
        self._num_computed = np.zeros(max_rows, np.int64)
        self._awaited: deque[tuple[np.ndarray, np.ndarray]] = deque()  # rows of plans, and which are sampled
        # What is left to do for the plan at hand: tokens of the stream, and rows.
        self._to_receive = self._to_send = 0
        self._to_hand_back: torch.Tensor | None = None

    def begin(self, plan: SchedulerOutput, state: TokenState) -> None:
        self._state, rows = state, plan.rows
        self._take_tokens(rows)
        for new in plan.new_rows:
            self._num_known[new.row] = POOLS if new.pooling is not None else len(new.token_ids)
            self._num_computed[new.row] = new.num_computed
        self._num_computed[rows] += plan.num_tokens
        samples = self._num_computed[rows] >= self._num_known[rows]
        self._num_known[rows] += samples
        total = plan.total_tokens
        self._to_receive, self._to_send = (0 if self.is_first else total), (0 if self.is_last else total)
        if samples.any() and not self.is_last:
            self._awaited.append((rows, samples))
        elif samples.any():
            (self._to_hand_back,) = to_device(self._device, rows, dtype=np.int64)

    def _take_tokens(self, rows: np.ndarray) -> None:
        """As late as possible, so that stages overlap: up to the last plan in flight that samples for one of the rows,
        and those that have left the pipeline."""
        needed = max(0, len(self._awaited) - self._stages.size)
        for place, (theirs, samples) in enumerate(self._awaited, 1):
            if np.isin(theirs[samples], rows).any():
                needed = max(needed, place)
        for _ in range(needed):
            theirs, samples = self._awaited.popleft()
            found = torch.empty(len(theirs), 1 + len(self._offsets), dtype=torch.int32, device=self._device)
            self._tokens.receive(found, self._tokens.size - 1)
            # Other rows may have been given to other requests by now.
            rows_, sampled = to_device(self._device, theirs[samples], np.flatnonzero(samples), dtype=np.int64)
            found = found[sampled]
            self._append(rows_, found[:, 0], found[:, 1:])

    def _append(self, rows: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor) -> None:
        """rows [n] get the first `counts` [n] of `tokens` [n, ...]; the next ones are drafts."""
        state, known = self._state, self._state.num_tokens[rows]
        state.token_ids[rows.unsqueeze(1), self._positions(known)] = tokens
        state.num_tokens[rows] = known + counts
        # What was computed of drafts that were not accepted is computed again.
        state.num_computed[rows] = torch.where(counts > 0, known + counts - 1, state.num_computed[rows])

    def _positions(self, known: torch.Tensor) -> torch.Tensor:
        """[n, ...]: where tokens and drafts lie behind `known` [n] tokens."""
        return (known.unsqueeze(1) + self._offsets).clamp(max=self._state.token_ids.shape[1] - 1)

    def stream(self, num_tokens: int) -> torch.Tensor | None:
        return None if self._inbox is None else self._inbox[:num_tokens]

    def receive(self) -> None:
        count, self._to_receive = self._to_receive, 0
        if count and self._inbox is not None:
            self._stages.receive(self._inbox[:count], self._stages.rank - 1)
        if self._to_hand_back is not None:
            self._known = self._state.num_tokens[self._to_hand_back]

    def send(self, stream: torch.Tensor) -> bool:
        count, self._to_send = self._to_send, 0
        if count:
            self._stages.send(stream[:count].clone(), self._stages.rank + 1)
        return not self.is_last

    def hand_back(self) -> None:
        rows, self._to_hand_back = self._to_hand_back, None
        if rows is not None:
            counts = (self._state.num_tokens[rows] - self._known).unsqueeze(1)
            tokens = self._state.token_ids[rows.unsqueeze(1), self._positions(self._known)]
            self._send_tokens(torch.cat((counts.int(), tokens), dim=1))

    def _send_tokens(self, found: torch.Tensor) -> None:
        for stage in range(self._tokens.size - 1):
            self._tokens.send(found, stage)

    def abandon(self) -> None:
        self.receive()
        self.send(self._like.new_zeros(self._to_send, self._like.shape[1]))
        rows, self._to_hand_back = self._to_hand_back, None
        if rows is not None:
            self._send_tokens(torch.zeros(len(rows), 1 + len(self._offsets), dtype=torch.int32, device=self._device))
