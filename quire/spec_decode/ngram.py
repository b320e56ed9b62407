"""Prompt lookup: drafts from an earlier occurrence of a row's last tokens in its own text, found on the device."""

from collections.abc import Sequence

import torch

from quire.attention.group_backends import GroupBackends
from quire.config import EngineConfig
from quire.kernels.ngram_drafts import new_workspace, ngram_drafts
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.worker.rows import RowState

LONGEST = 128  # tokens: n-grams that agree so far are alike, and repetitive texts would take long to compare


class NgramProposer(Proposer):
    finds = True
    agrees = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.shortest = config.speculative.prompt_lookup_min
        self.longest = max(self.shortest, min(config.speculative.prompt_lookup_max, LONGEST))
        assert config.scheduler.max_num_seqs is not None
        self._workspace = new_workspace(device, config.scheduler.max_num_seqs)

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        self._state = state

    def launch_kernels(self, row_counts: Sequence[int], max_tokens: int) -> None:
        rows = torch.full((1,), -1, dtype=torch.int32, device=self._state.token_ids.device)
        ngram_drafts(rows, self._state, self.shortest, self.longest, self.num_drafts, self._workspace)

    def propose(self, step: DraftStep) -> None:
        ngram_drafts(step.rows, step.state, self.shortest, self.longest, self.num_drafts, self._workspace)
