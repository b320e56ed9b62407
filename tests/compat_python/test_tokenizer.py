"""The tokenizer of `get_tokenizer()`, compared with transformers' on the same files."""

import pytest
from transformers import PreTrainedTokenizerFast

from quire import LLM

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, é 😀"}]
TEXTS = ["Hello, world 12 é 😀", " two  spaces", "<|im_start|>user"]


@pytest.fixture(scope="module")
def both(llm: LLM):
    ours = llm.get_tokenizer()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend,
        bos_token=ours.bos_token,
        eos_token=ours.eos_token,
        pad_token=ours.pad_token,
        chat_template=ours.chat_template,
    )
    return ours, theirs


def test_ids_and_texts(both):
    ours, theirs = both
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text) and ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids) and ours.tokenize(text) == theirs.tokenize(text)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.encode(text, truncation=True, max_length=3) == theirs.encode(text, truncation=True, max_length=3)
    assert ours.decode(ids[0]) == theirs.decode(ids[0])
    assert ours.batch_decode([[5, 6], [7]]) == theirs.batch_decode([[5, 6], [7]])
    assert ours(TEXTS).input_ids == theirs(TEXTS)["input_ids"]


def test_vocabulary(both):
    ours, theirs = both
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "bos_token", "eos_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.convert_tokens_to_ids(["a", "b"]) == theirs.convert_tokens_to_ids(["a", "b"])
    assert ours.convert_tokens_to_ids("a") == theirs.convert_tokens_to_ids("a")
    assert ours.eos_token_id in ours.all_special_ids and ours.eos_token in ours.all_special_tokens


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}])
def test_chats(both, options):
    ours, theirs = both
    assert ours.apply_chat_template(CHAT, tokenize=False, **options) == theirs.apply_chat_template(
        CHAT, tokenize=False, **options
    )
    ids = ours.apply_chat_template(CHAT, **options)
    assert ids == theirs.apply_chat_template(CHAT, return_dict=False, **options)
    assert ours.apply_chat_template([CHAT, CHAT], **options) == [ids, ids]
    assert ours.apply_chat_template(CHAT, return_dict=True, return_tensors="np", **options).input_ids.tolist() == [ids]


def test_padded_tensors(both):
    encoded = both[0](TEXTS, padding=True, return_tensors="pt")
    assert encoded.input_ids.shape == encoded.attention_mask.shape
    assert encoded["attention_mask"].sum(1).tolist() == [len(both[0].encode(text)) for text in TEXTS]
    with pytest.raises(ValueError, match="allowed: pt, np"):
        both[0]("x", return_tensors="tf")
