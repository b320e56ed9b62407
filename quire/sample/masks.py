"""Bias on tokens, and tokens that may not be drawn (yet)."""

import torch

from quire.messages.plan import NewRow
from quire.sample.processors import ByRow, SampleBatch


class LogitBias(ByRow):
    """Adds to the logits of named tokens."""

    rows: dict[int, tuple[torch.Tensor, torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        bias = new.params.logit_bias
        if bias:
            self.rows[new.row] = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            ids, values = self.rows[batch.row_list[i]]
            logits[i, ids.to(logits.device)] += values.to(logits.device)
        return logits


class AllowedTokens(ByRow):
    """Only these tokens may be drawn."""

    rows: dict[int, torch.Tensor]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        if new.params.allowed_token_ids is not None:
            self.rows[new.row] = torch.tensor(sorted(set(new.params.allowed_token_ids)))

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            ids = self.rows[batch.row_list[i]].to(logits.device)
            allowed = logits[i, ids]
            logits[i] = -torch.inf
            logits[i, ids] = allowed
        return logits


class MinTokens(ByRow):
    """No token that ends the request before it has its least number of tokens."""

    rows: dict[int, tuple[int, torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        if new.params.min_tokens and new.stop_ids:
            self.rows[new.row] = new.num_prompt_tokens + new.params.min_tokens, torch.tensor(sorted(set(new.stop_ids)))

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            first_allowed, ids = self.rows[batch.row_list[i]]
            ids = ids.to(logits.device)
            # The device knows the position, the host may not yet: choose there.
            logits[i, ids] = torch.where(batch.positions[i] < first_allowed, -torch.inf, logits[i, ids])
        return logits


class BadWords(ByRow):
    """The last token of a bad word may not follow the others of it, wherever those stand, as in transformers."""

    rows: dict[int, list[torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        if new.params.bad_words_token_ids:
            self.rows[new.row] = [torch.tensor(word) for word in new.params.bad_words_token_ids]

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            row = batch.row_list[i]
            for word in self.rows[row]:
                before = word[:-1].to(logits.device)
                at = batch.positions[i] - len(before) + torch.arange(len(before), device=logits.device)
                # A word longer than the context cannot match: position -1 would read elsewhere.
                matches = (batch.token_ids[row, at.clamp(min=0)] == before).all() & (at >= 0).all()
                last = int(word[-1])
                logits[i, last] = torch.where(matches, -torch.inf, logits[i, last])
        return logits
