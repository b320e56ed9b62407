"""From logits to tokens: the argmax, or one philox number per row looked up in the cumulative distribution, in order of
token id.

A row whose largest logit is not finite (NaN, infinite, or nothing but -inf) has no token to draw: it gets NO_TOKEN.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.kernels.accept_sampled import DrawnDrafts, accept_sampled_torch, pick_torch
from quire.kernels.dispatch import use_triton
from quire.kernels.keep_threshold import keep_threshold
from quire.kernels.native import sampling
from quire.kernels.native.sampling import serves_sampling
from quire.kernels.philox import Purpose, philox_uniform

NO_TOKEN = -1


class Draw(enum.IntEnum):
    """What the rows of a batch need; each level includes those before it."""

    GREEDY = 0
    RANDOM = 1  # temperature
    WARPED = 2  # and min-p, top-k or top-p


@dataclass(slots=True)
class DrawParameters:
    """By row, on the device, at fixed addresses."""

    seeds: torch.Tensor  # [rows] int64
    temperature: torch.Tensor  # [rows] float32, 1 for greedy rows
    log_min_p: torch.Tensor  # [rows] float32; -inf: off
    top_p: torch.Tensor  # [rows] float32; 1: off
    top_k: torch.Tensor  # [rows] int32; 0: off
    greedy: torch.Tensor  # [rows] int32: 1 or 0


class TokenRows(Protocol):
    """The part of the worker's row state that a draw reads and extends."""

    token_ids: torch.Tensor  # [rows, max_model_len] int32
    num_tokens: torch.Tensor  # [rows] int64
    num_computed: torch.Tensor  # [rows] int64


def draw_torch(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return pick_torch(logits.softmax(dim=1), uniform)


def draw_from(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """logits [n, vocab] float32, uniform [n] float64 -> [n] int64."""
    return sampling.draw(logits, uniform) if serves_sampling(logits.device) else draw_torch(logits, uniform)


def has_token(logits: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """[n] bool, from the rows' argmax [n]: argmax treats NaN as the largest value, so checking one logit is enough."""
    return logits.gather(1, likeliest.unsqueeze(1)).squeeze(1).isfinite()


def draw_random(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    parameters: DrawParameters,
    drafts: DrawnDrafts | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> torch.Tensor:
    """logits [n, vocab] float32 after temperature and filters -> [n] int64."""
    seeds = parameters.seeds[rows]
    tokens = draw_from(logits, philox_uniform(seeds, positions, purpose))
    if drafts is None:
        return tokens
    return accept_sampled_torch(tokens, logits, parameters.temperature[rows], seeds, positions, drafts)


def sample_tokens_torch(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    parameters: DrawParameters,
    draw: Draw,
    drafts: DrawnDrafts | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> torch.Tensor:
    rows = rows.clamp(min=0).long()
    logits = logits.float()
    tokens = logits.argmax(dim=1)
    possible = has_token(logits, tokens)
    if draw >= Draw.RANDOM:
        warped = logits / parameters.temperature[rows].unsqueeze(1)
        if draw >= Draw.WARPED:
            least = warped.amax(dim=1, keepdim=True) + parameters.log_min_p[rows].unsqueeze(1)
            warped.masked_fill_(warped < least, -torch.inf)
            least = keep_threshold(warped, parameters.top_k[rows].long(), parameters.top_p[rows])
            warped.masked_fill_(warped < least.unsqueeze(1), -torch.inf)
        drawn = draw_random(warped, rows, positions, parameters, drafts, purpose)
        tokens = torch.where(parameters.greedy[rows].bool(), tokens, drawn)
    return torch.where(possible, tokens, NO_TOKEN)


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    parameters: DrawParameters,
    draw: Draw,
    drafts: DrawnDrafts | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> torch.Tensor:
    """logits [n, vocab] of any float dtype; rows [n]; positions [n] int64, the index in its request of the token to be
    drawn -> [n] int64. Positions with `drafts` that were drawn too become these, or others, by `accept_sampled`."""
    if use_triton(logits):
        from quire.kernels.triton import sample_tokens as kernel

        out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        kernel.sample_tokens(logits, rows, positions, None, parameters, draw, out, drafts, purpose)
        return out
    return sample_tokens_torch(logits, rows, positions, parameters, draw, drafts, purpose)


def sample_and_append_torch(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: TokenRows,
    parameters: DrawParameters,
    draw: Draw,
    out: torch.Tensor,
) -> None:
    used = rows >= 0
    rows = rows[used].long()
    known = state.num_tokens[rows]
    tokens = sample_tokens_torch(logits[used], rows, known, parameters, draw).int()
    out[used[: len(out)]] = tokens
    done = state.num_computed[rows] == known
    at = known.clamp(max=state.token_ids.shape[1] - 1)
    state.token_ids[rows, at] = torch.where(done, tokens.clamp(min=0), state.token_ids[rows, at])
    state.num_tokens[rows] = known + done


def sample_and_append(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: TokenRows,
    parameters: DrawParameters,
    draw: Draw,
    out: torch.Tensor,
) -> None:
    """logits [n, vocab]; rows [n], -1 for padding -> out int32, [n] or without padding at the end. Every row that has
    computed all its tokens also gets its new one appended (token 0 for NO_TOKEN). Padding changes nothing."""
    if use_triton(logits):
        from quire.kernels.triton import sample_tokens as kernel

        kernel.sample_tokens(logits, rows, state.num_tokens, state, parameters, draw, out)
    else:
        sample_and_append_torch(logits, rows, state, parameters, draw, out)
