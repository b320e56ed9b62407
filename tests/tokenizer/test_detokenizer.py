import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from quire.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.properties import examples

PIECES = [
    "👩‍👩‍👧",
    "🇩🇪",
    "e\u0301",
    "你好",
    "한국",
    "हिन्दी",
    "ا",
    "hello",
    " world",
    "\n",
    "<|im_end|>",
    "1",
    "\u200d",
    "'ll",
    "  ",
]
any_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)


@pytest.fixture(scope="session", params=["smollm", "byte_level", "spm"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def stream(tokenizer: Tokenizer, prompt: list[int], generated: list[int], step: int = 1, **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    parts = [detokenizer.add(generated[i : i + step]) for i in range(0, len(generated), step)]
    parts.append(detokenizer.flush())
    assert detokenizer.text == "".join(parts)
    return parts


@given(text=any_text, step=st.integers(1, 4), skip=st.booleans())
@example(text="👩‍👩‍👧 end", step=1, skip=True)
@settings(max_examples=examples(60))
def test_increments_join_to_the_full_text(tokenizer, text, step, skip):
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, [], ids, step, skip_special_tokens=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
    if (
        tokenizer.decode(ids, skip_special_tokens=False) == text and "\ufffd" not in text
    ):  # some vocabularies lack bytes
        assert not any("\ufffd" in part for part in parts)


@given(prompt=any_text, text=any_text)
@settings(max_examples=examples(60))
def test_text_continues_the_prompt(tokenizer, prompt, text):
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    continued = "".join(stream(tokenizer, prompt_ids, ids))
    assert tokenizer.decode(prompt_ids) + continued == tokenizer.decode(prompt_ids + ids)


def test_a_character_in_pieces_appears_once_and_whole(smollm):
    ids = smollm.encode("好👩")
    assert len(ids) > 2
    assert [part for part in stream(smollm, [], ids) if part] == ["好", "👩"]


def test_prompt_that_ends_within_a_character(smollm):
    ids = smollm.encode("a👩b")
    assert "".join(stream(smollm, ids[:2], ids[2:])) == "👩b"


def test_an_incomplete_end_is_dropped_but_a_real_replacement_character_is_kept(smollm):
    ids = smollm.encode("ok 👩")
    assert "".join(stream(smollm, [], ids[:-1])) == "ok "
    assert "".join(stream(smollm, [], smollm.encode("\ufffd"))) == "\ufffd"


def test_bytes_that_are_no_text_do_not_block_the_stream(smollm):
    broken = smollm.encode("👩")[:-1] * 50
    detokenizer = IncrementalDetokenizer(smollm, [])
    text = detokenizer.add(broken) + detokenizer.add(smollm.encode(" fine"))
    assert text.endswith(" fine") and "\ufffd" in text


def test_first_space_of_sentencepiece_is_kept_after_a_prompt(spm):
    hello = spm.encode("hello", add_special_tokens=False)
    assert "".join(stream(spm, [], hello)) == "hello"
    assert "".join(stream(spm, [1], hello)) == "hello"  # <s> is no text
    assert "".join(stream(spm, [1, *hello], hello)) == " hello"


def test_unknown_ids_add_nothing(smollm):
    assert "".join(stream(smollm, [], [10**6, 19556])) == "Hello"


def test_decoders_that_need_context():
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, "game": 4, ",": 5}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.pieces(True) is None
    prompt, generated = [3, 4, 5], [1, 2, 3, 4, 5, 1, 2, 3, 3, 4, 1]
    for step in (1, 3):
        parts = stream(tokenizer, prompt, generated, step)
        assert tokenizer.decode(prompt) + "".join(parts) == tokenizer.decode(prompt + generated)
    assert tokenizer.token_text(4) == "game"


def test_decoders_that_need_context_hold_back_half_characters():
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "hi": 257}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # not one of the joining families
    tokenizer = Tokenizer(backend)
    assert tokenizer.pieces(True) is None
    ids = [257, *(byte + 1 for byte in "👩".encode()), 257]
    assert [part for part in stream(tokenizer, [], ids) if part] == ["hi", "👩", "hi"]
    assert "".join(stream(tokenizer, [], ids[:-2])) == "hi"


def without_pieces(tokenizer: Tokenizer) -> Tokenizer:
    """As one whose decoder does more than join tokens."""
    other = Tokenizer(tokenizer.backend)
    other._pieces = None
    return other


@pytest.mark.parametrize("joins", [True, False])
def test_special_tokens_that_stay_visible(smollm, joins):
    tokenizer = smollm if joins else without_pieces(smollm)
    ids = tokenizer.encode("<file_sep>Hello<|im_end|> you<issue_closed>!", add_special_tokens=False)
    visible = frozenset([tokenizer.special_id("<issue_closed>")])
    assert "".join(stream(tokenizer, [], ids, visible=visible)) == "Hello you<issue_closed>!"
    assert "".join(stream(tokenizer, [], ids)) == "Hello you!"
    shown = stream(tokenizer, [], ids, skip_special_tokens=False, visible=visible)
    assert "".join(shown) == "<file_sep>Hello<|im_end|> you<issue_closed>!"
    assert tokenizer.special_id("Hello") is None and tokenizer.special_id("no token at all") is None
