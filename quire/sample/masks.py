"""Logit bias, allowed tokens, min_tokens and bad words."""

import torch

from quire.messages.plan import NewRow
from quire.sample.processors import ByRow, SampleBatch


class LogitBias(ByRow):
    """Adds a bias to the logits of given tokens."""

    rows: dict[int, tuple[torch.Tensor, torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        bias = new.params.logit_bias
        if bias:
            self.rows[new.row] = (
                torch.tensor(list(bias), device=self.device),
                torch.tensor(list(bias.values()), dtype=torch.float32, device=self.device),
            )

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            ids, values = self.rows[batch.row_list[i]]
            logits[i, ids] += values
        return logits


class AllowedTokens(ByRow):
    """Only these tokens may be drawn."""

    rows: dict[int, torch.Tensor]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        if new.params.allowed_token_ids is not None:
            self.rows[new.row] = torch.tensor(sorted(set(new.params.allowed_token_ids)), device=self.device)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            ids = self.rows[batch.row_list[i]]
            allowed = logits[i, ids]
            logits[i] = -torch.inf
            logits[i, ids] = allowed
        return logits


class MinTokens(ByRow):
    """No stop token before min_tokens have been generated."""

    rows: dict[int, tuple[int, torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        # Under a grammar its mask does this, as it may allow nothing but a stop token.
        if new.params.min_tokens and new.stop_ids and new.params.structured_outputs is None:
            ids = torch.tensor(sorted(set(new.stop_ids)), device=self.device)
            self.rows[new.row] = new.num_prompt_tokens + new.params.min_tokens, ids

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            first_allowed, ids = self.rows[batch.row_list[i]]
            # The position is known on the device, perhaps not yet on the host.
            logits[i, ids] = torch.where(batch.positions[i] < first_allowed, -torch.inf, logits[i, ids])
        return logits


class BadWords(ByRow):
    """The last token of a bad word may not follow its other tokens, wherever those are, as in transformers."""

    rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        words = new.params.bad_words_token_ids
        if not words:
            return
        # Right-aligned, so that one comparison with the end of the context serves all words.
        width = max(len(word) for word in words) - 1
        before = torch.full((len(words), width), -1)
        for i, word in enumerate(words):
            before[i, width - len(word) + 1 :] = torch.tensor(word[:-1], dtype=torch.long)
        last = torch.tensor([word[-1] for word in words])
        lengths = torch.tensor([len(word) - 1 for word in words])  # without the last token
        self.rows[new.row] = before.to(self.device), lengths.to(self.device), last.to(self.device)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            row, position = batch.row_list[i], batch.positions[i]
            before, lengths, last = self.rows[row]
            width = before.shape[1]
            at = position - width + torch.arange(width, device=logits.device)
            same = (batch.token_ids[row, at.clamp(min=0)] == before) | (before < 0)
            matches = same.all(dim=1) & (lengths <= position)
            banned = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            banned.scatter_reduce_(0, last, matches, "amax", include_self=False)
            logits[i].masked_fill_(banned, -torch.inf)
        return logits
