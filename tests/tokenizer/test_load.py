import asyncio
import json
import os
import shutil

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from quire.checkpoint import json_file, resolve_model
from quire.checkpoint.resolve import Checkpoint
from quire.tokenizer import Tokenizer, load_tokenizer
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


def test_text_that_the_library_fails_on():
    no_unknown = Backend(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    for encode in (Tokenizer(no_unknown).encode, lambda text: Tokenizer(no_unknown).encode_batch(["a", text])):
        with pytest.raises(ValueError, match=r"the tokenizer cannot encode this text: WordLevel error"):
            encode("b")


class Other:
    """A backend that tokenizes in another way; all else is as in the one given."""

    def __init__(self, backend, encode_batch_fast):
        self._backend = backend
        self.encode_batch_fast = encode_batch_fast

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (type("PanicException", (BaseException,), {})("index out of bounds"), ValueError),
        (RuntimeError("index out of bounds"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(), SystemExit),
        (asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
def test_only_failures_of_the_library_are_errors_of_the_text(byte_level, raised, seen):
    def fail(texts, add_special_tokens):
        raise raised

    tokenizer = Tokenizer(Other(byte_level.backend, fail))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(seen) as error:
            encode("text")
        assert seen is not ValueError or str(error.value).endswith("cannot encode this text: index out of bounds")


def test_single_texts_go_the_way_that_leaves_other_threads_running(byte_level):
    sent = []

    def note(texts, add_special_tokens):
        sent.append(texts)
        return byte_level.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    assert Tokenizer(Other(byte_level.backend, note)).encode(CORPUS[0]) == byte_level.encode(CORPUS[0])
    assert sent == [[CORPUS[0]]]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_are_no_regular_ones(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        load(folder)


def test_tokenizer_json_that_is_too_large(folder, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_BYTES", (folder / "tokenizer.json").stat().st_size - 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json has \d+ bytes; at most"):
        load(folder)


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
    assert Tokenizer(backend).token_text(token) == backend.decode([token]) == "naïve 世"
