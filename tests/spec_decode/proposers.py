"""A worked example of proposers: what they guess is fixed, random, or right in part by a text that is known beforehand.
One file, and a name: --speculative-config '{"method": "tests.spec_decode.proposers:Fixed", ...}'."""

import torch

from quire.config import EngineConfig
from quire.kernels.accept_drafts import DraftRows
from quire.messages.plan import NewRow
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.spec_decode.sampled import SampledDrafts

KNOWN: list[list[int]] = []  # texts that right drafts come from: prompt and output of a run without drafts
ACCEPTANCE = 0.8  # of Synthetic
CHAIN: dict[int, list[float]] = {}  # of Sampling: the logits of the draft vocabulary after each token of it


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


class Synthetic(Fixed):
    """Each draft is right with probability ACCEPTANCE, whatever the others are."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        assert config.scheduler.max_num_seqs is not None
        width = max(map(len, KNOWN)) + 1 + self.num_drafts
        self.texts = torch.zeros(config.scheduler.max_num_seqs, width, dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(0)

    def add_row(self, new: NewRow) -> None:
        known = new.token_ids.tolist()
        text = next((text for text in KNOWN if text[: len(known)] == known), known)
        self.texts[new.row, : len(text)] = torch.tensor(text)

    def drafts(self, rows: torch.Tensor, state: DraftRows, at: torch.Tensor) -> torch.Tensor:
        right = self.texts[rows.unsqueeze(1), at.clamp(max=self.texts.shape[1] - 1)]
        wrong = torch.rand(right.shape, generator=self.generator, device=right.device) >= ACCEPTANCE
        return torch.where(wrong, (right == 0).long(), right)


class Sampling(Proposer):
    """Draws from CHAIN, a draft vocabulary of a few tokens."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        assert config.scheduler.max_num_seqs is not None
        tokens = torch.tensor(list(CHAIN))
        num_rows, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
        self.chain = torch.zeros(vocab_size, len(tokens), device=device)
        self.chain[tokens] = torch.tensor(list(CHAIN.values()), device=device)
        self.sampled = SampledDrafts(num_rows, self.num_drafts, vocab_size, device, target_ids=tokens)

    def propose(self, step: DraftStep) -> None:
        assert self.sampled is not None
        state, used = step.state, step.rows[step.rows >= 0]
        rows = used.long()
        for j in range(self.num_drafts):
            at = state.num_tokens[rows] + j
            logits = self.chain[state.token_ids[rows, at - 1].long()]
            drafts = self.sampled.draw(j, logits, used, state, self.parameters)
            state.token_ids[rows, at.clamp(max=state.token_ids.shape[1] - 1)] = drafts.int()
