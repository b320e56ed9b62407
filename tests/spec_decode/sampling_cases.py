"""Rows that draw from a known chain of tokens through the real sampler and verification, with drafts from another
chain; and how likely the counts of their texts are. On any device."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from quire.messages.plan import BlockAppends, ModelRunnerOutput, SchedulerOutput
from quire.messages.sampling_params import SamplingParams
from quire.sample.sampler import Sampler
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.spec_decode.sampled import SampledDrafts
from quire.worker.verification import sample_and_verify
from tests.sample.rows import new_row

NUM_ROWS = 20_000
VOCAB = 6
PROMPT = (1, 4)
LENGTH = 3  # of the texts that are counted


def chain(seed: int, spread: float = 1.5) -> torch.Tensor:
    """[vocab, vocab]: logits of the token after each."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


class Rows:
    """As the worker's row state."""

    def __init__(self, num_rows: int, device: str) -> None:
        self.token_ids = torch.zeros(num_rows, 40, dtype=torch.int32, device=device)
        self.token_ids[:, : len(PROMPT)] = torch.tensor(PROMPT, dtype=torch.int32)
        self.num_tokens = torch.full((num_rows,), len(PROMPT), dtype=torch.int64, device=device)
        self.num_computed = self.num_tokens - 1
        self.token_limit = torch.full_like(self.num_tokens, 30)
        self.num_found = torch.zeros(num_rows, dtype=torch.int32, device=device)


class ChainProposer(Proposer):
    """Draws its drafts from a chain of its own, over some or all of the tokens."""

    def __init__(
        self, logits: torch.Tensor, num_rows: int, num_drafts: int, tokens: Sequence[int] | None, dtype: torch.dtype
    ) -> None:
        ids = None if tokens is None else torch.tensor(tokens)
        self.chain = logits if ids is None else logits[:, ids]
        self.num_drafts = num_drafts
        self.sampled: SampledDrafts = SampledDrafts(num_rows, num_drafts, VOCAB, logits.device, dtype, ids)

    def propose(self, step: DraftStep) -> None:
        state, rows = step.state, step.rows.long()
        for j in range(self.num_drafts):
            at = state.num_tokens[rows] + j
            logits = self.chain[state.token_ids[rows, at - 1].long()]
            state.token_ids[rows, at] = self.sampled.draw(j, logits, step.rows, state, self.parameters).int()


@dataclass
class Case:
    params: dict[str, float] = field(default_factory=dict)
    num_drafts: int = 3
    draft_chain: torch.Tensor = field(default_factory=lambda: chain(2))
    draft_tokens: Sequence[int] | None = None
    dtype: torch.dtype = torch.float32


def write_texts(
    case: Case, device: str = "cpu", num_rows: int = NUM_ROWS, first_seed: int = 0
) -> tuple[np.ndarray, float]:
    """[rows, LENGTH] tokens, and how many of the drafts that were looked at were accepted."""
    target, state = chain(1).to(device), Rows(num_rows, device)
    sampler = Sampler(num_rows, VOCAB, torch.device(device))
    params = SamplingParams(**case.params)
    for row in range(num_rows):
        sampler.add_row(dataclasses.replace(new_row(row, params, PROMPT), seed=first_seed + row))
    proposer = ChainProposer(case.draft_chain.to(device), num_rows, case.num_drafts, case.draft_tokens, case.dtype)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    counts = np.full(num_rows, case.num_drafts, np.int32)
    plan = SchedulerOutput(0, np.arange(num_rows), 1 + counts, [], [], BlockAppends(), [], (), num_drafts=counts)
    step = DraftStep(plan, rows, state)
    proposer.parameters = sampler.parameters.device
    sampler.parameters.upload()
    proposer.propose(step)
    accepted = tried = 0
    while int(state.num_tokens.min()) < len(PROMPT) + LENGTH:
        at = state.num_tokens.unsqueeze(1) - 1 + torch.arange(1 + case.num_drafts, device=device)
        logits = target[state.token_ids.gather(1, at).long()].flatten(0, 1)
        state.num_computed += 1 + case.num_drafts
        pending = sample_and_verify(
            plan, logits, rows, state, sampler, None, case.num_drafts, proposer, step, lambda output: output
        )
        output: ModelRunnerOutput = pending.result()
        accepted += int(output.num_sampled.sum()) - num_rows
        tried += int(np.minimum(output.num_sampled, case.num_drafts).sum())
    return state.token_ids[:, len(PROMPT) : len(PROMPT) + LENGTH].cpu().numpy(), accepted / tried


def probabilities(params: dict[str, float]) -> np.ndarray:
    """[vocab] * LENGTH: of every text, by a reading of the parameters of its own."""
    wanted = SimpleNamespace(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | params)
    table = chain(1).double().numpy()
    found = np.zeros([VOCAB] * LENGTH)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        share = 1.0
        for i, token in enumerate(text):
            before = [*PROMPT, *text[:i]]
            share *= next_token(table[before[-1]].copy(), before, wanted, params)[token]
        found[text] = share
    return found


def next_token(x: np.ndarray, before: list[int], wanted: SimpleNamespace, params: dict[str, float]) -> np.ndarray:
    seen = np.isin(np.arange(VOCAB), before)
    repetition = np.where(seen, params.get("repetition_penalty", 1.0), 1.0)
    x = np.where(x > 0, x / repetition, x * repetition)
    counts = np.bincount(before[len(PROMPT) :], minlength=VOCAB)
    x -= params.get("frequency_penalty", 0.0) * counts + params.get("presence_penalty", 0.0) * (counts > 0)
    x /= wanted.temperature
    p = np.exp(x - x.max())
    p[p < wanted.min_p] = 0
    order = np.argsort(-p)
    if wanted.top_k:
        p[order[wanted.top_k :]] = 0
    p /= p.sum()
    p[order[np.cumsum(p[order]) - p[order] >= wanted.top_p]] = 0
    return p / p.sum()


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of the chi-square test, cells of less than five pooled. 0 if something impossible was observed."""
    observed, expected = observed.ravel().astype(float), expected.ravel() * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    few = expected < 5
    observed = np.append(observed[~few], observed[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    used = expected > 0
    statistic = float((np.square(observed - expected)[used] / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2)))


def count_texts(texts: np.ndarray) -> np.ndarray:
    counts = np.zeros([VOCAB] * LENGTH)
    np.add.at(counts, tuple(texts.T), 1)
    return counts
