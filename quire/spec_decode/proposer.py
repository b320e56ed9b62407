"""What a proposer of drafts must offer, and finding the one that was configured."""

import importlib
from dataclasses import dataclass
from typing import ClassVar

import torch

from quire.config import EngineConfig
from quire.kernels.accept_drafts import DraftRows
from quire.kernels.sample_tokens import DrawParameters
from quire.messages.plan import NewRow, SchedulerOutput
from quire.spec_decode.sampled import SampledDrafts

# Methods by name: the module and class of each, imported when it is configured.
PROPOSERS: dict[str, str] = {}


@dataclass(slots=True)
class DraftStep:
    """What a step leaves for a proposer, after its tokens are drawn and the state is advanced by those accepted."""

    plan: SchedulerOutput  # what the host knows of the step
    rows: torch.Tensor  # [n or more]: the plan's, then padding of -1
    state: DraftRows


class Proposer:
    """Made as `Class(config, device)`. Any drafts are safe: a wrong one costs its part of a step, never a token."""

    # Whether rows may be left without drafts: propose() then sets state.num_found of the rows.
    finds: ClassVar[bool] = False
    # What a proposer that samples draws with: its drafts are accepted by min(1, p / q). None: drafts are single
    # guesses, accepted if equal to the token that is drawn without them.
    sampled: SampledDrafts | None = None

    parameters: DrawParameters  # of the rows, for proposers that sample; set before any step

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.num_drafts = config.speculative.num_drafts

    def add_row(self, new: NewRow) -> None:
        """A request gets a row: for the first time, or when resumed after preemption."""

    def remove_row(self, row: int) -> None:
        """Its request has finished or was preempted."""

    def propose(self, step: DraftStep) -> None:
        """After every step: write guesses behind the known tokens of rows that may decode next,
        state.token_ids[row, num_tokens : num_tokens + num_drafts], on the current stream, without waiting for it."""
        raise NotImplementedError


def make_proposer(config: EngineConfig, device: torch.device) -> Proposer | None:
    method = config.speculative.method
    if method is None:
        return None
    place = PROPOSERS.get(method, method)
    module, _, name = place.partition(":")
    try:
        proposer: Proposer = getattr(importlib.import_module(module), name)(config, device)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"speculative_config: method {place!r} cannot be imported: {error}") from error
    return proposer
