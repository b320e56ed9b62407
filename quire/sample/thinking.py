"""The thinking budget: a limit on reasoning tokens."""

import torch

from quire.messages.plan import NewRow
from quire.sample.processors import ByRow, SampleBatch


class ThinkingBudget(ByRow):
    """Once a row has used its budget, the tokens that end reasoning are forced one after the other. Which one is next
    follows from the position, so nothing waits for the host."""

    rows: dict[int, tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]]  # type: ignore[assignment]

    def add_row(self, new: NewRow) -> None:
        budget, reasoning = new.params.thinking_token_budget, new.params.reasoning
        if budget is None or reasoning is None or reasoning.open is False:
            return
        start = reasoning.start if reasoning.open is None else []
        forced_from = new.num_prompt_tokens + len(start) + budget
        start_ids = torch.tensor(start, dtype=torch.int32, device=self.device)
        end_ids = torch.tensor(reasoning.end, dtype=torch.int32, device=self.device)
        forced = torch.tensor(reasoning.budget_end or reasoning.end, dtype=torch.int32, device=self.device)
        self.rows[new.row] = new.num_prompt_tokens, forced_from, start_ids, end_ids, forced

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        for i in self.places(batch):
            row, position = batch.row_list[i], batch.positions[i]
            first, forced_from, start, end, forced = self.rows[row]
            tokens = batch.token_ids[row, first:]
            step = position - forced_from
            forces = (step >= 0) & (step < len(forced)) & ~_contains(tokens, end, position - first)
            if len(start):
                forces &= (tokens[: len(start)] == start).all()
            wanted = forced[step.clamp(0, len(forced) - 1)].long()
            others = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device).index_fill_(0, wanted, False)
            # Forced even if it was masked before (a bad word, a token not allowed).
            logits[i, wanted] = torch.where(forces, torch.zeros_like(logits[i, wanted]), logits[i, wanted])
            logits[i].masked_fill_(others & forces, -torch.inf)
        return logits


def _contains(tokens: torch.Tensor, sequence: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Whether the sequence occurs in the first `length` tokens."""
    if len(tokens) < len(sequence):
        return torch.zeros((), dtype=torch.bool, device=tokens.device)
    begins = torch.arange(len(tokens) - len(sequence) + 1, device=tokens.device)
    same = (tokens.unfold(0, len(sequence), 1) == sequence).all(dim=1)
    return (same & (begins + len(sequence) <= length)).any()
