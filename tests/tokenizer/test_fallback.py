"""Folders without tokenizer.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from quire.checkpoint.resolve import Checkpoint
from quire.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from quire.tokenizer.fallback import SlowBackend
from tests.tokenizer.vocabularies import CORPUS

TEXTS = [*CORPUS, "", "hello <|end|> world", "é世 👩‍👩‍👧"]


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(Checkpoint("tiny", "dummy", folder, ()))


def write_config(folder: Path, **fields) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def gpt2_folder(tmp_path, byte_level_folder) -> Path:
    """vocab.json and merges.txt alone."""
    folder = write_config(
        tmp_path / "gpt2", tokenizer_class="GPT2Tokenizer", bos_token="<|bos|>", eos_token="<|end|>", chat_template="T"
    )
    Backend.from_file(str(byte_level_folder / "tokenizer.json")).model.save(str(folder))
    assert {file.name for file in folder.iterdir()} == {"vocab.json", "merges.txt", "tokenizer_config.json"}
    return folder


@pytest.fixture
def bytes_folder(tmp_path) -> Path:
    """ByT5: one token per byte, in Python, with no vocabulary file."""
    return write_config(tmp_path / "byt5", tokenizer_class="ByT5Tokenizer")


@pytest.fixture
def ctrl_folder(tmp_path) -> Path:
    """CTRL: words in pieces ("he@@ llo"), in Python."""
    folder = write_config(tmp_path / "ctrl", tokenizer_class="CTRLTokenizer", unk_token="<unk>")
    tokens = ["<unk>", *(char + "@@" for char in "helowrd"), *"helowrd", "hello", "world"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture(params=["gpt2_folder", "bytes_folder", "ctrl_folder"])
def folder(request) -> Path:
    return request.getfixturevalue(request.param)


def test_ids_and_text_equal_those_of_transformers(folder):
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
        ids = ours.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs) and ours.special_ids == set(theirs.all_special_ids)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("kind", ["gpt2_folder", "bytes_folder"])
def test_streamed_text_joins_to_the_whole(kind, step, request):
    tokenizer = load(request.getfixturevalue(kind))
    ids = tokenizer.encode(CORPUS[2] + " 👩‍👩‍👧!", add_special_tokens=False)
    prompt, generated = ids[:2], ids[2:]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    parts = [detokenizer.add(generated[i : i + step]) for i in range(0, len(generated), step)]
    whole = "".join(parts) + detokenizer.flush()
    assert tokenizer.decode(prompt) + whole == tokenizer.decode(ids)
    assert "\ufffd" not in whole


def test_a_fast_one_is_used_directly_and_keeps_its_template(gpt2_folder, bytes_folder):
    fast = load(gpt2_folder)
    assert isinstance(fast.backend, Backend) and fast.pieces(True) is not None
    assert fast.chat_template == "T"
    assert isinstance(load(bytes_folder).backend, SlowBackend)


def test_slow_tokenizers_survive_ids_and_texts_that_are_none(bytes_folder):
    tokenizer = load(bytes_folder)
    assert tokenizer.decode([107, 10**6, -1]) == "h"
    assert tokenizer.convert_ids_to_tokens([107, 10**6]) == ["h", ""]
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("bad \ud800")
    with pytest.raises(ValueError, match="must be a string, not int"):
        tokenizer.encode_batch(["good", 5])


def test_files_that_are_no_regular_ones(gpt2_folder):
    (gpt2_folder / "vocab.json").unlink()
    os.mkfifo(gpt2_folder / "vocab.json")
    with pytest.raises(ValueError, match=r"vocab\.json is not a regular file"):
        load(gpt2_folder)


def test_transformers_is_not_installed(gpt2_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install transformers.*--tokenizer"):
        load(gpt2_folder)


def test_code_of_the_model_is_not_run(tmp_path):
    folder = write_config(tmp_path / "m", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')")
    with pytest.raises(ValueError, match=r"transformers cannot load its tokenizer.*--tokenizer"):
        load(folder)
    assert not (tmp_path / "was-here").exists()


def test_a_vocabulary_that_is_missing_is_not_replaced_by_an_empty_one(tmp_path):
    with pytest.raises(ValueError, match=r"none of the files of its tokenizer: .*tokenizer\.model"):
        load(write_config(tmp_path / "m", tokenizer_class="LlamaTokenizer"))


def test_tokenizer_json_needs_no_transformers(byte_level_folder):
    code = (
        "import sys; from pathlib import Path; from quire.checkpoint.resolve import Checkpoint; "
        "from quire.tokenizer import load_tokenizer; "
        f"load_tokenizer(Checkpoint('m', 'dummy', Path({str(byte_level_folder)!r}), ())); "
        "print({'transformers', 'torch'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
