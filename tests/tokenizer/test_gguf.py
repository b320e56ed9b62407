from pathlib import Path

import pytest

from quire.checkpoint.gguf_header import GGUFHeader
from quire.tokenizer.gguf import NORMAL, build_gguf_tokenizer, merges_from_scores
from quire.tokenizer.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from tests.tokenizer.vocabularies import sentencepiece


def test_embedded_vocabulary(smollm):
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id) == (49152, 1, 2)
    assert smollm.special_ids == set(range(17))
    assert "<|im_start|>" in smollm.chat_template


def test_smollm_words_and_single_digits(smollm):
    assert smollm.encode("Hello world") == [19556, 905]  # no BOS: the file says so
    assert smollm.convert_ids_to_tokens(smollm.encode("in 2024")) == ["in", "Ġ", "2", "0", "2", "4"]


def test_smollm_chat_markup(smollm):
    ids = smollm.encode("<|im_start|>user\nHello<|im_end|>\n")
    assert ids == [1, 4093, 198, 19556, 2, 198]
    assert smollm.decode(ids) == "user\nHello\n"
    assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize(
    "text",
    ["", " ", "a  b\n\n\tc", "naïve café", "你好，世界", "👩‍👩‍👧 🇩🇪 e\u0301", "x² ½ ١٢٣", "I'll DON'T", "a\x00b\r\n"],
)
def test_smollm_round_trips(smollm, text):
    assert smollm.decode(smollm.encode(text)) == text


def byte_level(pre: str | None, tokens: list[str], merges: list[str], **changes):
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
    }
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    return build_gguf_tokenizer(GGUFHeader(Path("tiny.gguf"), values | changes, {}))


DIGITS = [*"0123456789", "Ġ", "12", "123", "1234"]
DIGIT_MERGES = ["1 2", "12 3", "123 4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "4", "5"]),
        ("dbrx", ["123", "4", "5"]),
        ("gpt-4o", ["123", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
    ],
)
def test_each_family_cuts_digits_its_own_way(pre, pieces):
    tokenizer = byte_level(pre, DIGITS, DIGIT_MERGES)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345")) == pieces


def test_gpt4o_cuts_at_capitals_and_keeps_contractions():
    cut = build_pre_tokenizer(PRE_TOKENIZERS["gpt-4o"]).pre_tokenize_str("HelloWorld's (I'LL)")
    assert [piece for piece, _ in cut] == ["Hello", "World's", "Ġ(", "I'LL", ")"]


def test_llama3_prefers_whole_words_to_merges():
    tokens = ["a", "b", "c", "ab", "bc", "abc"]  # "abc" is in the vocabulary but no merge leads to it
    assert byte_level("llama-bpe", tokens, ["b c"]).encode("abc") == [5]
    assert byte_level("gpt-2", tokens, ["b c"]).encode("abc") == [0, 4]


def test_qwen2_normalizes():
    tokens = ["Ã", "©", "Ã©", "e", "Ì", "ģ"]
    assert byte_level("qwen2", tokens, ["Ã ©"]).encode("e\u0301") == [2]


def test_falcon_cuts_punctuation_off_and_digits_by_three():
    cut = build_pre_tokenizer(PRE_TOKENIZERS["falcon"]).pre_tokenize_str("it's 12345 (ok)...")
    assert [piece for piece, _ in cut] == ["it", "'", "s", "Ġ", "123", "45", "Ġ", "(", "ok", ")..."]


def test_unknown_pre_tokenizer_is_an_error_and_a_missing_one_a_warning(caplog):
    with pytest.raises(ValueError, match=r"'martian'.*known: gpt-2.*--tokenizer"):
        byte_level("martian", DIGITS, DIGIT_MERGES)
    assert len(byte_level(None, DIGITS, DIGIT_MERGES).encode("1234")) == 1
    assert "GPT-2 is assumed" in caplog.text


def test_bos_and_eos_flags():
    options = {"tokenizer.ggml.bos_token_id": 10, "tokenizer.ggml.eos_token_id": 11}
    assert byte_level("llama-bpe", DIGITS, [], **options).encode("1") == [10, 1]  # the family's habit
    assert byte_level("gpt-2", DIGITS, [], **options).encode("1") == [1]
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = byte_level("gpt-2", DIGITS, [], **options, **both)
    assert tokenizer.encode("1") == [10, 1, 11]
    assert tokenizer.encode("1", add_special_tokens=False) == [1]


def test_sentencepiece_merges_by_score(spm):
    assert spm.convert_ids_to_tokens(spm.encode("hello world")) == ["<s>", "▁hello", "▁w", "or", "ld"]
    assert spm.decode(spm.encode("hello world")) == "hello world"
    assert spm.token_text(spm.encode("hello")[-1]) == " hello"


def test_merges_of_equal_scores_are_in_the_order_of_transformers():
    tokens = ["a", "b", "c", "ab", "bc", "abc", "bca", "ca"]
    scores = [0.0, 0.0, 0.0, -2.0, -2.0, -2.0, -1.0, -2.0]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(
        (-score, -cut, vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    merges = merges_from_scores(vocabulary, tokens, [NORMAL] * len(tokens), scores)
    assert merges == [(left, right) for *_, left, right in ranked]
    assert merges[:4] == [("bc", "a"), ("b", "ca"), ("ab", "c"), ("a", "b")]


def test_sentencepiece_falls_back_to_bytes(spm):
    ids = spm.encode("é", add_special_tokens=False)
    assert spm.convert_ids_to_tokens(ids) == ["▁", "<0xC3>", "<0xA9>"]
    assert spm.decode(ids) == "é"


def test_sentencepiece_special_and_user_tokens(spm):
    ids = spm.encode("hello<tool>hello</s>", add_special_tokens=False)
    assert spm.convert_ids_to_tokens(ids) == ["▁hello", "<tool>", "▁hello", "</s>"]
    assert spm.special_ids == {0, 1, 2}
    assert spm.decode(ids) == "hello<tool> hello"


def test_sentencepiece_without_space_prefix():
    tokenizer = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello hello")) == ["hello", "▁hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'; supported: 'gpt2'"),
        ({"tokenizer.ggml.tokens": []}, "holds no vocabulary"),
        ({"tokenizer.ggml.scores": [0.0]}, "1 scores"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos token 1000000 is outside"),
    ],
)
def test_metadata_that_cannot_be_used(changes, message):
    with pytest.raises(ValueError, match=message):
        sentencepiece(**changes)
