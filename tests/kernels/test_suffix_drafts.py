"""Suffix decoding in C, against counting in lists."""

import random

import numpy as np
import pytest
import torch

from quire.kernels.native.build import library
from quire.kernels.native.lookup import SharedTexts, suffix_drafts
from tests.kernels.ngram_cases import Rows, random_rows

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def suffixes_of(text: list[int], other: list[int], depth: int) -> int:
    """How many last tokens of both are equal."""
    n = 0
    while n < min(depth, len(text), len(other)) and text[-1 - n] == other[-1 - n]:
        n += 1
    return n


def continuations(known, texts, depth, least):
    """(length of the match, what follows) for every position of the texts, the newest first."""
    for text in texts:
        for end in range(len(text) - 1, 0, -1):
            length = suffixes_of(text[:end], known, depth)
            if length >= least:
                yield length, text[end:]


def best_drafts(found, room, factor, probability) -> tuple[float, list[int]]:
    best: tuple[float, list[int]] = (0.0, [])
    for length in sorted({length for length, _ in found}, reverse=True):
        matches = [behind for n, behind in found if n >= length]
        chance, score, drafts = 1.0, 0.0, []
        while len(drafts) < min(room, int(length * factor + 1e-4)) and matches:
            ahead = [behind[len(drafts)] for behind in matches if len(behind) > len(drafts)]
            if not ahead:
                break
            token = max(ahead, key=ahead.count)  # the first of several: the newest
            chance *= ahead.count(token) / len(matches)
            if chance < probability - 1e-6:
                break
            score += chance
            matches = [m for m in matches if len(m) > len(drafts) and m[len(drafts)] == token]
            drafts.append(token)
        if score > best[0] + 1e-4:
            best = score, drafts
    return best


def expected(rows, state, texts, drafts, depth, factor, probability) -> dict[int, list[int]]:
    """`texts` newest first."""
    found = {}
    for row in rows.tolist():
        if row < 0:
            continue
        count = int(state.num_tokens[row])
        known = state.token_ids[row, :count].tolist()
        room = min(drafts, int(state.token_limit[row]) - count - 1)
        found[row] = []
        if room > 0 and int(state.num_computed[row]) == count - 1:
            own = best_drafts(list(continuations(known, [known], depth, 2)), room, factor, probability)
            shared = best_drafts(list(continuations(known, texts, depth, 3)), room, factor, probability)
            found[row] = shared[1] if shared[0] > own[0] + 1e-4 else own[1]
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("depth", "factor", "probability"), [(24, 1.0, 0.1), (4, 2.0, 0.0), (6, 0.5, 0.5)])
def test_the_most_frequent_continuation_is_found(seed, depth, factor, probability):
    rows, state = random_rows(seed, "cpu", width=60, drafts=6)
    dice = random.Random(seed)
    texts = [[dice.randrange(2 + seed % 5 * 3) for _ in range(dice.randrange(40))] for _ in range(5)]
    shared = SharedTexts(max_texts=10, max_tokens=512)
    for i, text in enumerate(texts):
        shared.add(str(i), np.array(text), salt=0)
    wanted = expected(rows, state, texts[::-1], 6, depth, factor, probability)
    suffix_drafts(rows, state, shared, np.zeros(12, np.int64), 6, depth, factor, probability)
    for row, drafts in wanted.items():
        count, known = int(state.num_found[row]), int(state.num_tokens[row])
        assert count == len(drafts)
        assert state.token_ids[row, known : known + 6].tolist() == drafts + [0] * (6 - count)


def row_of(*tokens: int) -> Rows:
    ids = torch.zeros(1, 64, dtype=torch.int32)
    ids[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    known = torch.tensor([len(tokens)])
    return Rows(ids, known, known - 1, known + 20, torch.zeros(1, dtype=torch.int32))


def drafts_behind(texts: SharedTexts, *tokens: int, salt: int = 0) -> list[int]:
    state = row_of(*tokens)
    suffix_drafts(torch.tensor([0], dtype=torch.int32), state, texts, np.array([salt]), 4, 24, 1.0, 0.1)
    return state.token_ids[0, len(tokens) : len(tokens) + int(state.num_found)].tolist()


def test_texts_serve_rows_of_their_salt():
    texts = SharedTexts(max_texts=4, max_tokens=64)
    texts.add("a", np.array([1, 2, 3, 4, 5, 6]), salt=7)
    assert drafts_behind(texts, 9, 1, 2, 3, salt=7) == [4, 5, 6]
    assert drafts_behind(texts, 9, 1, 2, 3, salt=0) == []


def test_a_text_counts_once():
    texts = SharedTexts(max_texts=4, max_tokens=64)
    texts.add("a", np.array([1, 2, 3, 8]), salt=0)
    texts.add("b", np.array([1, 2, 3, 9]), salt=0)
    texts.add("a", np.array([1, 2, 3, 8]), salt=0)
    texts.remove("a")
    assert drafts_behind(texts, 1, 2, 3) == [9]
    assert len(texts) == 1


def test_memory_is_bounded():
    """The oldest texts make room, by number and by length; names of those are forgotten too."""
    texts = SharedTexts(max_texts=3, max_tokens=128)
    size = texts.num_bytes
    dice = random.Random(1)
    for i in range(200):
        texts.add(str(i), np.array([i, i + 300, i + 600, *range(dice.randrange(60))]), salt=0)
        assert len(texts) <= 3 and texts.num_bytes == size
    assert size <= 128 * 18 + 3 * 24
    assert drafts_behind(texts, 0, 1, 2) == [3, 4, 5]
    assert drafts_behind(texts, 150, 450, 750) == []


def test_a_text_that_is_longer_than_the_memory_keeps_its_end():
    texts = SharedTexts(max_texts=3, max_tokens=16)
    texts.add("long", np.arange(1000), salt=0)
    assert drafts_behind(texts, 993, 994, 995) == [996, 997, 998]
    assert drafts_behind(texts, 3, 4, 5) == []


def test_a_row_that_repeats_one_token():
    """More occurrences than are counted, all of the greatest length."""
    state = Rows(
        torch.full((1, 5000), 7, dtype=torch.int32),
        torch.tensor([4900]),
        torch.tensor([4899]),
        torch.tensor([4990]),
        torch.zeros(1, dtype=torch.int32),
    )
    suffix_drafts(torch.tensor([0], dtype=torch.int32), state, None, np.zeros(1, np.int64), 8, 24, 1.0, 0.1)
    assert int(state.num_found) == 8
