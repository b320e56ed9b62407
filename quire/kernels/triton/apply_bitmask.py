"""Grammar masks: logits of tokens that are not allowed become -inf."""

import torch
import triton
import triton.language as tl

WORDS = 64


@triton.jit
def _apply_bitmask_kernel(logits, stride, bitmask, mask_stride, places, vocab, num_words, WORDS: tl.constexpr):
    i = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask + i * mask_stride + word, mask=word < num_words, other=-1)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    banned = ((bits[:, None] >> bit[None, :]) & 1) == 0
    target = logits + tl.load(places + i).to(tl.int64) * stride + token
    # Only forbidden logits are written, and none is read.
    never = tl.full([WORDS, 32], -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(target, never, mask=banned & (token < vocab))


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, places: torch.Tensor) -> None:
    vocab = logits.shape[1]
    num_words = triton.cdiv(vocab, 32)
    _apply_bitmask_kernel[(triton.cdiv(num_words, WORDS), len(places))](
        logits,
        logits.stride(0),
        bitmask,
        bitmask.stride(0),
        places,
        vocab,
        num_words,
        WORDS=WORDS,
        num_warps=4,
    )
