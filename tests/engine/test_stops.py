"""Stop strings end the text at the same character, however tokens split it, and no part of them is ever sent."""

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.engine.completion import Completion
from quire.messages.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams
from quire.tokenizer.stops import has_repetition
from tests.properties import examples


class PieceDetokenizer:
    """Token i is piece i of a text cut anywhere."""

    def __init__(self, pieces):
        self.pieces = pieces

    def add(self, token_ids):
        return "".join(self.pieces[i] for i in token_ids)

    def flush(self):
        return ""


def cut(text, places):
    edges = [0, *sorted({p % (len(text) + 1) for p in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def stream(pieces, stops, include=False, min_tokens=0, kind=RequestOutputKind.DELTA):
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=1000, output_kind=kind
    )
    completion = Completion("id", 0, params, PieceDetokenizer(pieces))
    shown = []
    for token in range(len(pieces)):
        completion.add_tokens([token])
        if token == len(pieces) - 1:
            completion.finish("length", None)
        shown.append(completion.output())
        if completion.finish_reason is not None:
            break
    return shown, completion


def expected(text, stops, include):
    """A reader of single characters: the first stop to be complete; of those complete at once, the longest."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text(alphabet="abA é漢🙂", min_size=0, max_size=30)
stop_lists = st.lists(st.text(alphabet="abA é漢🙂", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=examples(500))
@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=12), st.booleans())
@example("aab", ["ab"], [1, 2], False)
def test_every_split_gives_the_same_text_and_shows_no_part_of_a_stop(text, stops, places, include):
    want, reason = expected(text, stops, include)
    shown, completion = stream(cut(text, places), stops, include)
    assert "".join(part.text for part in shown) == want == completion.text
    assert completion.stop_reason == reason
    assert completion.finish_reason == ("stop" if reason else "length")
    so_far = ""
    for part in shown:
        so_far += part.text
        assert want.startswith(so_far)


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=12))
def test_cumulative_outputs_only_grow(text, stops, places):
    shown, completion = stream(cut(text, places), stops, kind=RequestOutputKind.CUMULATIVE)
    texts = [part.text for part in shown]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == completion.text


def test_tokens_after_the_stop_do_not_count():
    params = SamplingParams(stop="END", max_tokens=100)
    completion = Completion("id", 0, params, PieceDetokenizer(["one ", "EN", "D two", " three"]))
    completion.add_tokens([0, 1, 2, 3])  # several tokens of one step
    assert completion.token_ids == [0, 1, 2] and completion.output().text == "one "


def test_no_stop_before_min_tokens():
    shown, completion = stream(["x.", "y.", "z."], ["."], min_tokens=1)
    assert completion.text == "x.y" and len(shown) == 2


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4))
def test_repetition_equals_a_plain_search(tokens, low, span, count):
    detection = RepetitionDetection(min_pattern_size=low, max_pattern_size=low + span, min_count=count)
    plain = any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(low, low + span + 1)
    )
    assert has_repetition(tokens, detection) == plain
