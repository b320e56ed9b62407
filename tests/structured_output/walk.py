"""Outputs drawn from a grammar's masks alone, with no model: every token that is allowed can come."""

import random

import numpy as np

from quire.structured_output.backends.base import CompiledGrammar, Matcher
from quire.structured_output.vocabulary import Vocabulary

CLOSING = (b'"', b"}", b"]", b'"}', b"}}", b")", b",")


def allowed_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    row = np.zeros(vocabulary.num_words, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def draw(
    compiled: CompiledGrammar, vocabulary: Vocabulary, rng: random.Random, most: int = 3000, draft: int = 0
) -> str:
    """One output. Tokens that close something are preferred now and then, so that it ends. With `draft`, up to so many
    tokens are accepted ahead of each and rolled back, as under speculation."""
    matcher = compiled.matcher()
    closing = {i for i, token in enumerate(vocabulary.tokens) if token in CLOSING}
    text = b""
    for _ in range(most):
        if draft:
            _speculate(matcher, vocabulary, rng, draft)
        allowed = allowed_tokens(matcher, vocabulary)
        assert allowed, f"nothing may follow {text!r}"
        assert max(allowed) < len(vocabulary.tokens)
        ends = [i for i in allowed if i in closing or i == vocabulary.end_id]
        token = rng.choice(ends if ends and rng.random() < 0.4 else allowed)
        if token == vocabulary.end_id:
            return text.decode()
        assert vocabulary.tokens[token], f"token {token} is special or unknown"
        assert matcher.accept(token)
        text += vocabulary.tokens[token]
    raise AssertionError(f"no end after {most} tokens: {text[:200]!r}")


def _speculate(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, count: int) -> None:
    """Drafts are right or wrong; some of the right ones turn out not to be what the model takes."""
    accepted = 0
    for _ in range(rng.randrange(count + 1)):
        allowed = [i for i in allowed_tokens(matcher, vocabulary) if i != vocabulary.end_id]
        if not allowed:
            break
        accepted += matcher.accept(rng.choice(allowed))
    matcher.rollback(accepted)
