"""A worked example of proposers: what they guess is fixed, random, or right in part by a text that is known beforehand.
One file, and a name: --speculative-config '{"method": "tests.spec_decode.proposers:Fixed", ...}'."""

import torch

from quire.kernels.accept_drafts import DraftRows
from quire.spec_decode.proposer import DraftStep, Proposer

KNOWN: list[list[int]] = []  # texts that right drafts come from: prompt and output of a run without drafts


class Fixed(Proposer):
    """Writes its drafts behind the known tokens of rows, on the device."""

    def propose(self, step: DraftStep) -> None:
        state, rows = step.state, step.rows[step.rows >= 0].long()
        at = state.num_tokens[rows].unsqueeze(1) + torch.arange(self.num_drafts, device=rows.device)
        at = at.clamp(max=state.token_ids.shape[1] - 1)
        state.token_ids[rows.unsqueeze(1), at] = self.drafts(rows, state, at).int()

    def drafts(self, rows: torch.Tensor, state: DraftRows, at: torch.Tensor) -> torch.Tensor:
        return torch.full_like(at, 7)


class Random(Fixed):
    def drafts(self, rows: torch.Tensor, state: DraftRows, at: torch.Tensor) -> torch.Tensor:
        return torch.randint_like(at, 5)


class Right(Fixed):
    """The next tokens of a known text that begins as the row does. Reads the device."""

    def drafts(self, rows: torch.Tensor, state: DraftRows, at: torch.Tensor) -> torch.Tensor:
        guesses = torch.full_like(at, 3)
        for i, row in enumerate(rows.tolist()):
            known = state.token_ids[row, : int(state.num_tokens[row])].tolist()
            for text in KNOWN:
                if text[: len(known)] == known:
                    for j, token in enumerate(text[len(known) : len(known) + self.num_drafts]):
                        guesses[i, j] = self.guess(token, len(known) + j)
        return guesses

    def guess(self, token: int, position: int) -> int:
        return token


class HalfRight(Right):
    """With every third one wrong."""

    def guess(self, token: int, position: int) -> int:
        return token if position % 3 else 0


class Finds(Right):
    """Has drafts only where a known text goes on."""

    finds = True

    def drafts(self, rows: torch.Tensor, state: DraftRows, at: torch.Tensor) -> torch.Tensor:
        guesses = super().drafts(rows, state, at)
        state.num_found[rows] = torch.where((guesses == 3).all(dim=1), 0, self.num_drafts).int()
        return guesses
