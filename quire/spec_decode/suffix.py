"""Suffix decoding: drafts that most often followed a row's last tokens, in its own text and in earlier outputs."""

import hashlib

import numpy as np
import torch

from quire.config import EngineConfig
from quire.kernels.accept_drafts import DraftRows
from quire.kernels.native.build import library
from quire.kernels.native.lookup import MAX_TEXT_TOKENS, SharedTexts, suffix_drafts
from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow
from quire.spec_decode.proposer import DraftStep, Proposer

MAX_DEPTH = 256  # tokens of a match: repetitive texts would take long to compare


class SuffixProposer(Proposer):
    """Looks drafts up on the host. Outputs of requests that have left their row are shared with later requests of the
    same cache salt; the oldest are forgotten. On a GPU propose() waits for the step's tokens."""

    finds = True
    agrees = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        if library() is None:
            raise ValueError("the method suffix needs a C compiler (cc, gcc or clang); the method ngram does not")
        options, num_rows = config.speculative, config.scheduler.max_num_seqs
        assert num_rows is not None
        self._copies_rows = device.type != "cpu"
        self._depth = min(options.suffix_decoding_max_tree_depth, MAX_DEPTH)
        self._factor = options.suffix_decoding_max_spec_factor
        self._least_probability = options.suffix_decoding_min_token_prob
        most = options.suffix_decoding_max_cached_requests
        longest = config.model.max_model_len or config.model.derived_max_model_len
        self._texts = SharedTexts(most, min(MAX_TEXT_TOKENS, most * longest)) if most else None
        self._salts = np.zeros(num_rows, np.int64)
        self._owners: dict[int, tuple[str, int]] = {}  # by row: the request, and how long its prompt is
        self._state: DraftRows | None = None
        self._host: DraftRows | None = None  # the state itself, or if it is on a GPU a copy

    def add_row(self, new: NewRow) -> None:
        self._owners[new.row] = new.request_id, new.num_prompt_tokens
        self._salts[new.row] = salt_number(new.cache_salt)
        if self._texts is not None:
            # A preempted request has come back: its output is in the row, and will be added again when it leaves.
            self._texts.remove(new.request_id)
        if isinstance(self._host, HostRows):
            self._host.add(new)

    def remove_row(self, row: int) -> None:
        owner = self._owners.pop(row, None)
        host = self._host
        if owner is None or host is None or self._texts is None:
            return
        request_id, start = owner
        output = host.token_ids[row, start : int(host.num_tokens[row])]
        if len(output):
            self._texts.add(request_id, output.numpy(), int(self._salts[row]))

    def propose(self, step: DraftStep) -> None:
        if step.state is not self._state:
            self._state = step.state
            self._host = HostRows(step.state) if self._copies_rows else step.state
        host = self._host
        assert host is not None
        if not isinstance(host, HostRows):
            self._find(step.rows, host)
            return
        rows = step.plan.rows
        there = step.rows[: len(rows)].long()
        host.read(rows, there, step.state, 1 + self.num_drafts)
        self._find(torch.from_numpy(rows), host)
        host.send(rows, there, step.state, self.num_drafts)

    def _find(self, rows: torch.Tensor, host: DraftRows) -> None:
        suffix_drafts(
            rows, host, self._texts, self._salts, self.num_drafts, self._depth, self._factor, self._least_probability
        )


class HostRows:
    """The rows on the host, for looking drafts up: tokens as they come, counts of the last step."""

    def __init__(self, state: DraftRows) -> None:
        self.token_ids = torch.zeros(state.token_ids.shape, dtype=torch.int32)  # touched as far as rows are long
        self.num_tokens, self.num_computed, self.token_limit = torch.zeros(3, len(self.token_ids), dtype=torch.int64)
        self.num_found = torch.zeros(len(self.token_ids), dtype=torch.int32)

    def add(self, new: NewRow) -> None:
        count = len(new.token_ids)
        self.token_ids[new.row, :count] = torch.from_numpy(np.asarray(new.token_ids, np.int32))
        self.num_tokens[new.row] = count

    def read(self, rows: np.ndarray, there: torch.Tensor, state: DraftRows, most: int) -> None:
        """Wait for the rows' counts and last tokens, `most` of them."""
        counts = torch.stack([state.num_tokens[there], state.num_computed[there], state.token_limit[there]], dim=1)
        at = (counts[:, :1] - 1 - torch.arange(most, device=there.device)).clamp(min=0)
        last = state.token_ids[there.unsqueeze(1), at].long()
        counts, last, at = torch.cat([counts, last, at], dim=1).cpu().split([3, most, most], dim=1)
        here = torch.from_numpy(rows.astype(np.int64))
        known = counts[:, 0]
        # Of rows that advanced without a call of propose(), such as those before the first.
        missing = known - self.num_tokens[here] > most
        for row, count in zip(here[missing].tolist(), known[missing].tolist(), strict=True):
            self.token_ids[row, :count] = state.token_ids[row, :count].cpu()
        self.token_ids[here.unsqueeze(1), at] = last.int()
        self.num_tokens[here], self.num_computed[here], self.token_limit[here] = counts.unbind(1)

    def send(self, rows: np.ndarray, there: torch.Tensor, state: DraftRows, num_drafts: int) -> None:
        here = torch.from_numpy(rows.astype(np.int64))
        at = self.num_tokens[here].unsqueeze(1) + torch.arange(num_drafts)
        drafts = self.token_ids[here.unsqueeze(1), at]
        arrays = (drafts.numpy(), self.num_found[here].numpy(), at.numpy())
        drafts_, found, at_ = to_device(state.token_ids.device, *arrays)
        state.token_ids[there.unsqueeze(1), at_.view(-1, num_drafts).long()] = drafts_.view(-1, num_drafts)
        state.num_found[there] = found


def salt_number(salt: str | None) -> int:
    """64 bits, 0 for none."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little", signed=True)
