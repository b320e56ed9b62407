"""Grammars under speculation, with the verifier played by the test: drafts right and wrong, some of each accepted."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from quire.messages.plan import GrammarMask
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.bitmask import is_set
from quire.structured_output.manager import StructuredOutputManager
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output.random_forms import is_small, matches_regex, random_grammar, random_regex
from tests.structured_output.walk import allowed_tokens

REQUESTS = 64
MAX_TOKENS = 80
MIN_TOKENS = 3
TEMPERATURE = 2.0


class Verifier:
    """A model with random scores that tends to agree with drafts and to end."""

    def __init__(self, vocabulary: Vocabulary, forms: Sequence[StructuredOutputsParams], draft_len: int) -> None:
        self.vocabulary = vocabulary
        self.draft_len = draft_len
        self.rng = random.Random(draft_len)
        self.noise = np.random.default_rng(draft_len)
        self.manager = StructuredOutputManager(BackendRegistry(lambda: vocabulary), vocabulary.size, compile_seconds=60)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, list[int]] = {}
        self.num_accepted = 0  # drafts
        self.shadows = {}
        for index, form in enumerate(forms):
            params = SamplingParams(structured_outputs=form, min_tokens=MIN_TOKENS * (index % 2))
            request = EngineCoreRequest(str(index), index, np.zeros(1, np.int32), params, (vocabulary.end_id,), 0, 0.0)
            self.manager.add(request)
            self.tokens[index] = []
            self.shadows[index] = self.manager.registry.compile(form)
        while self.manager.pending:
            self.manager.compiler.wait(5)
            self.manager.ready()
        assert not self.manager.failures

    def step(self) -> None:
        drafts = {index: self._draft(index) for index in self.tokens}
        rows, place = [], 3  # rows without a grammar stand before
        for index, draft in drafts.items():
            rows.append((place, index))
            place += 1 + len(draft)
        mask = self.manager.fill(rows, drafts)
        assert mask is not None and mask.places.tolist() == list(range(3, place))
        assert not self.manager.failures
        took = {index: self._verify(mask, at - 3, drafts[index]) for at, index in rows}
        self._advance(took)
        assert not self.manager.failures

    def check_masks(self) -> None:
        """After what was rolled back, masks are those of a matcher that only ever saw what was accepted."""
        rows = [(place, index) for place, index in enumerate(self.tokens)]
        if not rows:
            return
        mask = self.manager.fill(rows)
        assert mask is not None
        for place, index in rows:
            fresh = self.shadows[index].matcher()
            assert all(map(fresh.accept, self.tokens[index]))
            expected = np.zeros(self.vocabulary.num_words, np.int32)
            fresh.fill(expected)
            if len(self.tokens[index]) < MIN_TOKENS * (index % 2):
                without_end = set(allowed_tokens(fresh, self.vocabulary)) - {self.vocabulary.end_id}
                assert not without_end or not is_set(mask.bitmask[place], self.vocabulary.end_id)
            else:
                np.testing.assert_array_equal(mask.bitmask[place], expected)

    def _draft(self, index: int) -> list[int]:
        """Tokens that fit, until one that may not, after which nothing does."""
        matcher = self.shadows[index].matcher()
        assert all(map(matcher.accept, self.tokens[index]))
        draft: list[int] = []
        for _ in range(self.rng.randint(0, self.draft_len)):
            fitting = [i for i in allowed_tokens(matcher, self.vocabulary) if i != self.vocabulary.end_id]
            if fitting and self.rng.random() < 0.8:
                draft.append(self.rng.choice(fitting))
                assert matcher.accept(draft[-1])
            else:
                draft += self.rng.choices(range(self.vocabulary.size), k=self.rng.randint(1, 2))
                draft += [self.vocabulary.end_id] * (self.rng.random() < 0.3)
                break
        return draft

    def _verify(self, mask: GrammarMask, first: int, draft: list[int]) -> list[int]:
        accepted: list[int] = []
        for ahead in range(len(draft) + 1):
            scores = self.noise.normal(size=self.vocabulary.size)
            scores[self.vocabulary.end_id] += 8
            if ahead < len(draft):
                scores[draft[ahead]] += 16
            accepted.append(self._sample(scores, mask.bitmask[first + ahead]))
            if ahead == len(draft) or accepted[-1] != draft[ahead] or accepted[-1] == self.vocabulary.end_id:
                break
            self.num_accepted += 1
        return accepted

    def _sample(self, scores: np.ndarray, row: np.ndarray) -> int:
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.vocabulary.size]
        weights = np.where(bits, np.exp(scores / TEMPERATURE), 0)
        assert weights.any()
        return int(self.noise.choice(len(weights), p=weights / weights.sum()))

    def _advance(self, took: dict[int, list[int]]) -> None:
        finish = []
        for index, tokens in took.items():
            self.tokens[index] += tokens
            if tokens[-1] == self.vocabulary.end_id:
                self.ended[index] = self.tokens.pop(index)[:-1]
                finish.append(FinishReason.STOP)
            elif len(self.tokens[index]) >= MAX_TOKENS:
                del self.tokens[index]
                finish.append(FinishReason.LENGTH)
            else:
                finish.append(FinishReason.NONE)
        self.manager.advance(
            EngineCoreOutputs(
                index=np.asarray([*took, 999], np.int64),  # and one without a grammar
                token_ids=np.asarray([*(token for tokens in took.values() for token in tokens), 7], np.int32),
                offsets=np.cumsum([0, *map(len, took.values()), 1]).astype(np.int32),
                finish=np.asarray([*finish, FinishReason.NONE], np.int8),
                num_cached=np.zeros(len(took) + 1, np.int32),
            )
        )


@pytest.mark.parametrize("draft_len", [0, 1, 5])
@pytest.mark.parametrize("backend", ["auto", "guidance", "outlines"])
def test_outputs_match_whatever_is_drafted(vocabulary: Vocabulary, backend: str, draft_len: int) -> None:
    rng = random.Random(backend)
    checks, forms = [], []
    for i in range(REQUESTS):
        if i % 4 == 3 and backend != "outlines":
            grammar = random_grammar(rng)
            checks.append(grammar.matches)
            forms.append(StructuredOutputsParams(grammar=grammar.ebnf(), backend=backend))
        else:
            regex = next(one for one in iter(lambda: random_regex(rng), "") if backend != "outlines" or is_small(one))
            checks.append(lambda text, regex=regex: matches_regex(regex, text))
            forms.append(StructuredOutputsParams(regex=regex, backend=backend))
    verifier = Verifier(vocabulary, forms, draft_len)
    for step in range(MAX_TOKENS):
        if not verifier.tokens:
            break
        verifier.step()
        if step % 4 == 0:
            verifier.check_masks()
    assert not verifier.manager.active and not verifier.tokens
    assert len(verifier.ended) > REQUESTS // 2
    assert verifier.num_accepted > 100 if draft_len > 1 else draft_len or not verifier.num_accepted
    for index, tokens in verifier.ended.items():
        text = b"".join(vocabulary.tokens[token] for token in tokens).decode()
        assert checks[index](text), (forms[index].text, text)
