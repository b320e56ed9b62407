"""Which pages each row of a step reads, and which of their keys are masked.

A query at position p sees keys p - window < j <= p (all j <= p without a window). Pages wholly before a row's window
are not read: they may have been freed. Rows are padded only with pages of their own, so no other row's are read.
"""

from dataclasses import dataclass

import torch

# A batch's gathered keys and values should stay in the processor's cache until they are multiplied.
MAX_BATCH_HEAD_TOKENS = 48 * 1024
# Padding (in tokens over all rows) beyond which another batch, with its fixed cost, is faster.
MAX_PADDING = 1024
# Queries of a prompt handled together: the scores of more fall out of the processor's cache.
QUERY_BLOCK = 128


@dataclass
class DecodeBatch:
    """Rows of one query token and similar length, attended together."""

    tokens: torch.Tensor  # [B]: their tokens in the step
    pages: torch.Tensor  # [2 * KV * B * pages per row]: pages in the cache seen as [blocks * 2 * KV, ...]
    masked: torch.Tensor  # [B, 1, L] bool: gathered positions outside the row or its window
    first: torch.Tensor  # [B]: position of the first gathered key minus that of the query


@dataclass
class QueryBlock:
    """Consecutive query tokens of a prompt. Keys are counted from the row's first gathered position."""

    first_token: int  # in the step
    num_tokens: int
    first_key: int
    last_key: int
    masked_from: int  # keys before this one, counted from first_key, are visible to the whole block
    masked: torch.Tensor  # [num_tokens, keys from masked_from] bool
    first: int  # position of the first key minus that of the first query


@dataclass
class PromptRow:
    """A row of several query tokens."""

    pages: torch.Tensor  # [2 * KV * pages]
    blocks: list[QueryBlock]


def plan_decode(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
) -> list[DecodeBatch]:
    rows = (query_start.diff() == 1).nonzero().view(-1)
    if not len(rows):
        return []
    lens = seq_lens[rows].long()
    first_key = (lens - window).clamp_(min=0) if window else torch.zeros_like(lens)
    first_page = first_key // block_size
    num_pages = (lens + block_size - 1) // block_size - first_page

    num_pages, order = num_pages.sort(descending=True)
    rows, lens, first_key, first_page = (t[order] for t in (rows, lens, first_key, first_page))
    batches = []
    for begin, end in similar_lengths(num_pages.tolist(), block_size, num_kv_heads):
        part = slice(begin, end)
        columns = torch.arange(int(num_pages[begin]), device=rows.device)
        last_page = first_page[part] + num_pages[part] - 1
        wanted = torch.minimum(first_page[part, None] + columns, last_page[:, None])
        blocks = block_table[rows[part]].gather(1, wanted).long()
        start = first_page[part] * block_size
        positions = start[:, None] + torch.arange(len(columns) * block_size, device=rows.device)
        masked = (positions < first_key[part, None]) | (positions >= lens[part, None])
        tokens = query_start[:-1][rows[part]].long()
        first = start - (lens[part] - 1)
        batches.append(DecodeBatch(tokens, page_index(blocks, num_kv_heads), masked.unsqueeze(1), first))
    return batches


def plan_prompts(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
    causal: bool = True,
) -> list[PromptRow]:
    starts = query_start.tolist()
    plans = []
    for row, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[row + 1] - starts[row]
        if query_len < 2 or seq_len == 0:  # one token, or padding
            continue
        cached = seq_len - query_len
        first_page = max(0, cached - window + 1) // block_size if window else 0
        last_page = (seq_len + block_size - 1) // block_size
        pages = page_index(block_table[row, first_page:last_page].long(), num_kv_heads)
        blocks = []
        for done in range(0, query_len, QUERY_BLOCK):
            size = min(QUERY_BLOCK, query_len - done)
            see = None if causal else seq_len
            block = query_block(cached + done, size, window, block_table.device, see)
            block.first_token = starts[row] + done
            block.first_key -= first_page * block_size
            block.last_key -= first_page * block_size
            blocks.append(block)
        plans.append(PromptRow(pages, blocks))
    return plans


def query_block(
    position: int, size: int, window: int | None, device: torch.device, num_visible: int | None = None
) -> QueryBlock:
    """Queries at position .. position + size - 1, with keys in absolute positions. `num_visible`: leading keys that all
    of them see; None: each sees those up to its own."""
    if num_visible is not None:
        nothing = torch.empty(size, 0, dtype=torch.bool, device=device)
        return QueryBlock(0, size, 0, num_visible, num_visible, nothing, -position)
    first_key = max(0, position - window + 1) if window else 0
    last_key = position + size
    # Without a window (or before it is full) only keys of the block itself can be later than a query.
    all_see_first = window is None or last_key <= window
    masked_from = position if all_see_first else first_key
    keys = torch.arange(masked_from, last_key, device=device)
    queries = torch.arange(position, last_key, device=device)[:, None]
    masked = keys > queries
    if window and not all_see_first:
        masked |= keys <= queries - window
    return QueryBlock(0, size, first_key, last_key, masked_from - first_key, masked, first_key - position)


def page_index(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Block ids -> pages of the cache seen as [blocks * 2 * KV, ...]: keys first, heads outermost."""
    heads = torch.arange(2 * num_kv_heads, device=blocks.device)
    return (heads[:, None] + blocks.reshape(1, -1) * 2 * num_kv_heads).view(-1)


def similar_lengths(num_pages: list[int], block_size: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """Split rows, longest first, where padding the rest to the longest costs more than another batch."""
    batches, begin = [], 0
    for row in range(1, len(num_pages)):
        longest = num_pages[begin]
        padding = (len(num_pages) - row) * (longest - num_pages[row]) * block_size
        full = (row + 1 - begin) * longest * block_size * num_kv_heads > MAX_BATCH_HEAD_TOKENS
        if full or padding > MAX_PADDING:
            batches.append((begin, row))
            begin = row
    return [*batches, (begin, len(num_pages))]
