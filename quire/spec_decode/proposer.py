"""What a proposer of drafts must offer, and finding the one that was configured."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.group_backends import GroupBackends
from quire.config import EngineConfig
from quire.kernels.accept_drafts import DraftRows
from quire.kernels.sample_tokens import DrawParameters
from quire.layers.cache_layer import CacheLayer
from quire.layers.parallel import SINGLE, TensorParallel
from quire.messages.kv_cache import DraftNeeds
from quire.messages.plan import NewRow, SchedulerOutput
from quire.models.base import LanguageModel
from quire.spec_decode.hidden_states import HiddenStates
from quire.spec_decode.sampled import SampledDrafts
from quire.worker.rows import RowState

# Methods by name: the module and class of each, imported when it is configured.
PROPOSERS: dict[str, str] = {
    "ngram": "quire.spec_decode.ngram:NgramProposer",
    "suffix": "quire.spec_decode.suffix:SuffixProposer",
    "eagle": "quire.spec_decode.eagle:EagleProposer",
    "eagle3": "quire.spec_decode.eagle:Eagle3Proposer",
    "medusa": "quire.spec_decode.medusa:MedusaProposer",
    "mtp": "quire.spec_decode.mtp:MTPProposer",
    "draft_model": "quire.spec_decode.draft_model:DraftModelProposer",
}


@dataclass(slots=True)
class DraftStep:
    """What a step leaves for a proposer, after its tokens are drawn and the state is advanced by those accepted."""

    plan: SchedulerOutput  # what the host knows of the step
    rows: torch.Tensor  # [n or more]: the plan's, then padding of -1
    state: DraftRows
    hidden: torch.Tensor | None = None  # [tokens of the plan, width]: the target's, if the proposer has hidden_outputs
    num_sampled: torch.Tensor | None = None  # [n] int32: tokens that rows got; 0 where more of a prompt is to come

    @property
    def first_logits(self) -> np.ndarray:
        """[n]: which of the step's tokens got the logits that a row's first token was drawn from."""
        drafts = self.plan.num_drafts
        return np.cumsum(self.plan.num_tokens) - 1 - (0 if drafts is None else drafts)


class Proposer:
    """Made as `Class(config, device)`. Any drafts are safe: a wrong one costs its part of a step, never a token."""

    # Whether rows may be left without drafts: propose() then sets state.num_found of the rows.
    finds: bool = False
    # Whether it may be left out of steps after which no drafts are wanted.
    rests: bool = False
    # Hidden states of the target that propose() reads (hidden_states.py), for which a model of ours is needed.
    hidden_outputs: tuple[int | str, ...] = ()
    hidden: HiddenStates | None = None  # where they are, before `initialize`
    # What a proposer that samples draws with: its drafts are accepted by min(1, p / q). None: drafts are single
    # guesses, accepted if equal to the token that is drawn without them.
    sampled: SampledDrafts | None = None

    parameters: DrawParameters  # of the rows, for proposers that sample; set before initialize()

    tp: TensorParallel = SINGLE  # this rank's part in layers; set before prepare()
    # Whether ranks that share layers come to the same drafts, each by itself: by tokens, or by gathered logits. Others
    # get those of the first rank.
    agrees: bool = False

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.num_drafts = config.speculative.num_drafts

    def prepare(self, model: LanguageModel) -> None:
        """The target is loaded: load what belongs to it."""

    def cache_layers(self) -> Sequence[CacheLayer]:
        """Its layers with a part in the KV cache, once prepared; their indices follow those of the target's."""
        return ()

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        """Rows and cache are allocated; again once their sizes are known. Positions behind the last are not computed:
        models have no embeddings for them."""

    def launch_kernels(self, row_counts: Sequence[int], max_tokens: int) -> None:
        """On a GPU, run over padding whatever kernels a proposal may launch, after steps of one token in as many rows
        and of up to `max_tokens`. They are only collected, to be compiled ahead: values have no meaning."""

    def run_padding(self, num_tokens: int) -> None:
        """Run a proposal over padding, after a step of `num_tokens`: allocates the memory of a real one."""

    def capture_graphs(self, row_counts: Sequence[int]) -> None:
        """On a GPU, capture a proposal after steps that verify drafts in as many rows, instead of those captured
        before."""

    @property
    def needs(self) -> DraftNeeds:
        # The last of k drafts needs no pass of its own, but a step's last token is computed after it.
        # For the tokens of a prefix hit there are no hidden states that its layers could compute with.
        layers = self.cache_layers()
        return DraftNeeds(self.num_drafts if layers else 0, bool(layers and self.hidden_outputs))

    def add_row(self, new: NewRow) -> None:
        """A request gets a row: for the first time, or when resumed after preemption."""

    def skip(self, plan: SchedulerOutput) -> None:
        """Instead of propose(), after a step of rows that get no drafts; of those that `rests` only."""

    def remove_row(self, row: int) -> None:
        """Its request has finished or was preempted."""

    def propose(self, step: DraftStep) -> None:
        """After every step: write guesses behind the known tokens of rows that may decode next,
        state.token_ids[row, num_tokens : num_tokens + num_drafts], on the current stream, without waiting for it."""
        raise NotImplementedError

    def propose_on_ranks(self, step: DraftStep) -> None:
        """The same drafts on all ranks that share layers: they verify them together."""
        self.propose(step)
        if self.tp.size == 1 or self.agrees:
            return
        state, rows = step.state, step.rows[: len(step.plan.rows)].long()
        at = state.num_tokens[rows].unsqueeze(1) + torch.arange(self.num_drafts, device=rows.device)
        held = state.token_ids[rows.unsqueeze(1), at.clamp(max=state.token_ids.shape[1] - 1)]
        sent = self.tp.group.broadcast(torch.cat((held, state.num_found[rows].unsqueeze(1)), dim=1))
        write_drafts(state, rows, sent[:, :-1])
        state.num_found[rows] = sent[:, -1]


def write_drafts(state: DraftRows, rows: torch.Tensor, drafts: torch.Tensor) -> None:
    """drafts [n, k] behind the known tokens of rows [n], which are int64 and no padding."""
    at = state.num_tokens[rows].unsqueeze(1) + torch.arange(drafts.shape[1], device=rows.device)
    # Behind the last token that a row may have there is nothing to verify.
    at = at.clamp(max=state.token_ids.shape[1] - 1)
    state.token_ids[rows.unsqueeze(1), at] = drafts.int()


def make_proposer(config: EngineConfig, device: torch.device) -> Proposer | None:
    method = config.speculative.method
    if method is None:
        return None
    place = PROPOSERS.get(method, method)
    if ":" not in place:
        raise ValueError(
            f"not available yet: drafts by {method}; allowed: {', '.join(PROPOSERS)}, or your own as module:Class"
        )
    module, _, name = place.partition(":")
    try:
        proposer: Proposer = getattr(importlib.import_module(module), name)(config, device)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"speculative_config: method {place!r} cannot be imported: {error}") from error
    return proposer
