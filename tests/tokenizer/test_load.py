import json
import shutil

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from quire.checkpoint import resolve_model
from quire.checkpoint.resolve import Checkpoint
from quire.tokenizer import load_tokenizer
from tests.tokenizer.vocabularies import CHAT_TEMPLATE, CORPUS

TEXTS = [*CORPUS, "", " ", "  two  spaces\n\n", "<|bos|>x<|end|>", "日本語 👩‍👩‍👧 e\u0301", "\t1234\r\n"]


@pytest.fixture
def folder(tmp_path, byte_level_folder):
    """A copy that a test may change."""
    return shutil.copytree(byte_level_folder, tmp_path / "model")


def load(folder):
    return load_tokenizer(Checkpoint("tiny", "dummy", folder, ()))


def change_config(folder, **fields):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_ids_equal_those_of_transformers(folder, flags):
    change_config(folder, **flags)
    ours, theirs = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids)
    assert ours.chat_template == CHAT_TEMPLATE


def test_tokens_known_only_to_the_config_are_added(folder):
    listed = {"400": {"content": "<|new|>", "special": True}, "401": {"content": "<think>", "special": False}}
    change_config(folder, added_tokens_decoder=listed, pad_token="<|pad|>")
    tokenizer = load(folder)
    new, think, pad = tokenizer.encode("<|new|><think><|pad|>", add_special_tokens=False)
    assert tokenizer.special_ids == {0, 1, new, pad}
    assert tokenizer.decode([new, think, pad]) == "<think>"


def test_saved_truncation_and_padding_are_ignored(folder):
    file = str(folder / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(file)
    assert load(folder).decode(load(folder).encode(CORPUS[0])) == CORPUS[0]


def test_chat_template_files(folder):
    change_config(folder, chat_template=[{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}])
    assert load(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load(folder).chat_template == "J"


def test_override(folder, smollm):
    embedded = resolve_model(None)
    assert load_tokenizer(embedded, str(folder)).vocab_size == load(folder).vocab_size
    assert load_tokenizer(embedded, str(folder / "tokenizer.json")).eos_token_id == 1
    assert load_tokenizer(Checkpoint("x", "dummy", folder, ()), str(embedded.path)).vocab_size == smollm.vocab_size
    with pytest.raises(ValueError, match="No tokenizer at '/nowhere'"):
        load_tokenizer(embedded, "/nowhere")


def test_folder_without_tokenizer_json(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*--tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a valid tokenizer\.json"):
        load(tmp_path)


def test_text_that_is_no_text(byte_level):
    with pytest.raises(ValueError, match="surrogate"):
        byte_level.encode("bad \ud800")
    with pytest.raises(ValueError, match="surrogate"):
        byte_level.encode_batch(["good", "bad \ud800"])
    with pytest.raises(ValueError, match="must be a string, not int"):
        byte_level.encode(5)


def test_single_tokens(byte_level):
    space_hello = byte_level.encode("a hello", add_special_tokens=False)[-1]
    assert byte_level.convert_ids_to_tokens([space_hello, 10**6]) == ["Ġhello", ""]
    assert byte_level.token_text(space_hello) == " hello"
    half = byte_level.encode("é世", add_special_tokens=False)
    assert b"".join(byte_level.token_bytes(token) for token in half) == "é世".encode()
    assert byte_level.token_text(0) == "<|bos|>"


def test_added_tokens_keep_their_text(byte_level_folder):
    backend = Backend.from_file(str(byte_level_folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("naïve 世", special=False)])
    token = backend.token_to_id("naïve 世")
    from quire.tokenizer import Tokenizer

    assert Tokenizer(backend).token_text(token) == backend.decode([token]) == "naïve 世"
