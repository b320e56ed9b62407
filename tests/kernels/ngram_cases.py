"""Prompt lookup against a search of lists, on any device: natively, in the interpreter and on a GPU."""

from dataclasses import dataclass

import torch

from quire.kernels.ngram_drafts import ngram_drafts_torch


@dataclass
class Rows:
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    num_computed: torch.Tensor
    token_limit: torch.Tensor
    num_found: torch.Tensor


def random_rows(seed: int, device: str, width: int = 200, num_rows: int = 12, drafts: int = 4):
    """Rows of few different tokens: decoding, in their prompt, at their limit; some are padding."""
    g = torch.Generator().manual_seed(seed)
    alphabet = 2 + seed % 5 * 3
    known = torch.randint(1, width + 1, (num_rows,), generator=g)
    known[:2] = torch.tensor([1, width])
    ids = torch.randint(0, alphabet, (num_rows, width + drafts), generator=g).int()
    computed = known - 1
    computed[torch.rand(num_rows, generator=g) < 0.2] = 0
    limit = torch.minimum(known + torch.randint(0, drafts + 4, (num_rows,), generator=g), torch.tensor(width))
    rows = torch.randperm(num_rows, generator=g).int()
    rows[torch.rand(num_rows, generator=g) < 0.2] = -1
    found = torch.full((num_rows,), -7, dtype=torch.int32)
    return rows.to(device), Rows(*(t.to(device) for t in (ids, known, computed, limit, found)))


def lookup(text: list[int], shortest: int, longest: int) -> int | None:
    """Where the tokens behind the earliest of the longest n-grams begin."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(n, len(text)):
            if text[end - n : end] == text[-n:]:
                return end
    return None


def expected(rows, state, shortest, longest, drafts) -> None:
    for row in rows.tolist():
        if row < 0:
            continue
        known = int(state.num_tokens[row])
        text = state.token_ids[row, :known].tolist()
        room = min(drafts, int(state.token_limit[row]) - known - 1)
        decodes = int(state.num_computed[row]) == known - 1
        at = lookup(text, shortest, longest) if decodes and room > 0 else None
        guess = [] if at is None else text[at : at + room]
        state.num_found[row] = len(guess)
        guess += [0] * (drafts - len(guess))
        state.token_ids[row, known : known + drafts] = torch.tensor(guess, dtype=torch.int32)


def check(seed: int, device: str, find) -> None:
    """`find` as ngram_drafts_torch."""
    for shortest, longest in ((1, 1), (1, 4), (2, 5), (3, 3)):
        wanted = None
        for function in (expected, ngram_drafts_torch, find):
            rows, state = random_rows(seed, device)
            function(rows, state, shortest, longest, 4)
            if wanted is None:
                wanted = state
            assert torch.equal(state.num_found, wanted.num_found), function
            assert torch.equal(state.token_ids, wanted.token_ids), function
