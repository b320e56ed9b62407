"""Logprobs and ranks of the tokens that were sampled."""

import torch
import triton
import triton.language as tl

BLOCK = 8192


@triton.jit
def _gather_logprobs_kernel(logits, stride, chosen, own_out, logsumexp, ranks, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    source = logits + i * stride
    own = tl.load(source + tl.load(chosen + i)).to(tl.float32)
    column = tl.arange(0, BLOCK)
    # Every lane keeps its own maximum and sum; they are reduced once, at the end.
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + column
        x = tl.load(source + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        above += (x > own).to(tl.int32)
        now = tl.where(x > largest, x, largest)
        base = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = now
    top = tl.max(largest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(total * tl.exp(largest - base), 0)
    tl.store(own_out + i, own)
    tl.store(logsumexp + i, base + tl.log(total))
    tl.store(ranks + i, tl.sum(above, 0) + 1)


def gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, own: torch.Tensor, logsumexp: torch.Tensor, ranks: torch.Tensor
) -> None:
    m, vocab = logits.shape
    if m:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        _gather_logprobs_kernel[(m,)](
            logits, logits.stride(0), chosen, own, logsumexp, ranks, vocab, BLOCK=block, num_warps=16
        )
