"""Repetition, frequency and presence penalties on the rows that use them."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _apply_penalties_kernel(
    logits,
    stride,
    places,
    slots,
    in_prompt,
    counts,
    strength,
    drafts,
    vocab,
    table_vocab,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(1)
    place = tl.load(places + i).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    repetition = tl.load(strength + slot * 3)
    frequency = tl.load(strength + slot * 3 + 1)
    presence = tl.load(strength + slot * 3 + 2)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    count = tl.load(counts + slot * table_vocab + token, mask=inside, other=0)
    for j in tl.static_range(DRAFTS):
        count += (token == tl.load(drafts + i * DRAFTS + j)).to(tl.int32)
    prompted = tl.load(in_prompt + slot * table_vocab + token, mask=inside, other=0) != 0
    generated = count > 0
    target = logits + place * stride + token
    x = tl.load(target, mask=inside, other=0.0)
    scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(prompted | generated, scaled, x)
    x = x - frequency * count.to(tl.float32) - tl.where(generated, presence, 0.0)
    tl.store(target, x, mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    strength: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> None:
    assert drafts is None or drafts.is_contiguous()
    vocab, table_vocab = logits.shape[1], counts.shape[1]
    _apply_penalties_kernel[(triton.cdiv(vocab, BLOCK), len(places))](
        logits,
        logits.stride(0),
        places,
        slots,
        in_prompt.view(torch.uint8),
        counts,
        strength,
        drafts if drafts is not None else places,  # not read without any
        vocab,
        table_vocab,
        DRAFTS=drafts.shape[1] if drafts is not None else 0,
        BLOCK=BLOCK,
        num_warps=4,
    )
