"""Files that were made to do harm: an error that names the file, at once, whatever they claim to hold."""

import json
import struct
from pathlib import Path

import pytest

from quire.checkpoint import gguf_header, json_file, safetensors_file
from quire.checkpoint.config import load_eos_token_ids, load_hf_config
from quire.checkpoint.gguf_config import gguf_to_hf_config
from quire.checkpoint.gguf_header import read_header
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.safetensors_file import read_entries
from quire.engine.resolve_config import longest_sequence, vocab_size

DEEP = b"[" * 100_000
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def safetensors(folder: Path, header: bytes | dict, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": ' + DEEP,
        b'{"__metadata__": ' + DEEP,
        b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e400]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}}',
        b'{"a": {"dtype": "F32", "shape": [2.9], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
        b'{"a": 1, "a": 2}',
        b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'\xff\xfe{"a"}',
        b"[]",
        {"a": [1, 2]},
        {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"a": F32 | {"shape": [-1, -2]}},
        {"a": F32 | {"shape": [2**62, 2**62, 0]}},
        {"a": F32 | {"shape": [1] * 1000 + [2]}},
        {"a": F32 | {"data_offsets": [8, 0]}},
        {"a": F32 | {"data_offsets": [-8, 0]}},
        {"a": F32 | {"data_offsets": [0]}},
        {"a": F32, "b": F32 | {"data_offsets": [4, 12]}},
    ],
)
def test_safetensors_headers(tmp_path, header):
    file = safetensors(tmp_path, header)
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
        read_entries(file)


def test_safetensors_with_more_tensors_than_a_model_has(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", 10)
    with pytest.raises(ValueError, match="more than 10 tensors"):
        read_entries(safetensors(tmp_path, b'{"a":[' + b"[]," * 30 + b"[]]}"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf(folder: Path, body: bytes, tensors: int = 0, values: int = 0) -> Path:
    file = folder / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + body + bytes(256))
    return file


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


@pytest.mark.parametrize(
    ("body", "tensors", "values"),
    [
        (b"", 2**40, 0),
        (b"", 0, 2**40),
        (struct.pack("<Q", 2**40), 0, 1),  # the length of a key
        (value("a", 8, struct.pack("<Q", 2**63)), 0, 1),
        (value("a", 9, array(8, 2**40)), 0, 1),
        (value("a", 9, array(0, 2**40)), 0, 1),
        (value("a", 9, array(9, 2**40)), 0, 1),
        (value("a", 9, array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(9, 1)))))), 0, 1),
        (value("a", 77, b""), 0, 1),
        (value("a", 4, bytes(4)) * 2, 0, 2),
        (value("general.alignment", 4, struct.pack("<I", 0)) + tensor("t", (2,)), 1, 1),
        (value("general.alignment", 4, struct.pack("<I", 7)) + tensor("t", (2,)), 1, 1),
        (value("general.alignment", 7, b"\1") + tensor("t", (2,)), 1, 1),
        (value("general.alignment", 9, array(0, 1, b"\10")) + tensor("t", (2,)), 1, 1),
        (tensor("t", (2**40, 2**40)), 1, 0),
        (tensor("t", (2**63, 2**63, 0)), 1, 0),
        (tensor("t", (2, 0)), 1, 0),
        (tensor("t", ()), 1, 0),
        (tensor("t", (1,) * 5), 1, 0),
        (tensor("t", (32 * 2**40,), kind=2), 1, 0),
        (tensor("t", (31,), kind=2), 1, 0),
        (tensor("t", (2,), offset=2**63), 1, 0),
        (tensor("t", (2,), offset=3), 1, 0),
        (tensor("t", (2,)) * 2, 2, 0),
        (tensor("t", (16,)) + tensor("u", (2,), offset=32), 2, 0),
    ],
)
def test_gguf_headers(tmp_path, body, tensors, values):
    with pytest.raises(ValueError, match=r"model\.gguf is corrupt or truncated"):
        read_header(gguf(tmp_path, body, tensors, values))


@pytest.mark.parametrize(
    ("limit", "body", "tensors", "values"),
    [
        ("MAX_ITEMS", value("a", 9, array(0, 60, bytes(60))) + value("b", 9, array(0, 60, bytes(60))), 0, 2),
        ("MAX_TEXT_BYTES", value("a", 8, text("x" * 200)), 0, 1),
        ("MAX_TEXT_BYTES", value("a", 9, array(8, 1, text("x" * 200))), 0, 1),
        ("MAX_TENSORS", b"".join(tensor(f"t{i}", (2,), offset=32 * i) for i in range(101)), 101, 0),
        ("MAX_VALUES", b"".join(value(f"v{i}", 0, b"\0") for i in range(101)), 0, 101),
    ],
)
def test_what_a_file_can_hold_is_still_bounded(tmp_path, monkeypatch, limit, body, tensors, values):
    file = gguf(tmp_path, body + bytes(4096), tensors, values)
    read_header(file)
    gguf_header._read_header.cache_clear()
    monkeypatch.setattr(gguf_header, limit, 100)
    with pytest.raises(ValueError, match=r"model\.gguf is corrupt"):
        read_header(file)


LLAMA = {
    "embedding_length": 64, "feed_forward_length": 64, "block_count": 1, "context_length": 64,
    "attention.head_count": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("embedding_length", value("", 6, struct.pack("<f", float("inf")))),
        ("block_count", value("", 8, text("many"))),
        ("context_length", value("", 9, array(4, 1, bytes(4)))),
        ("attention.head_count", value("", 4, bytes(4))),
        ("attention.layer_norm_rms_epsilon", value("", 9, array(4, 1, bytes(4)))),
        ("rope.freq_base", value("", 8, text("x"))),
        ("rope.scaling.factor", value("", 8, text("x"))),
        ("attention.key_length", value("", 9, array(4, 1, bytes(4)))),
    ],
)
def test_gguf_metadata_of_a_wrong_type_names_the_file(tmp_path, key, wrong):
    numbers = {f"llama.{name}": value(f"llama.{name}", 4, struct.pack("<I", n)) for name, n in LLAMA.items()}
    eps = "llama.attention.layer_norm_rms_epsilon"
    numbers[eps] = value(eps, 6, struct.pack("<f", 1e-5))
    architecture = value("general.architecture", 8, text("llama"))
    assert gguf_to_hf_config(read_header(gguf(tmp_path, architecture + b"".join(numbers.values()), 0, 7)))
    numbers[f"llama.{key}"] = text(f"llama.{key}") + wrong[8:]
    file = gguf(tmp_path, architecture + b"".join(numbers.values()), 0, len(numbers) + 1)
    gguf_header._read_header.cache_clear()
    with pytest.raises(ValueError, match=r"model\.gguf"):
        gguf_to_hf_config(read_header(file))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", "", 3, ["a"], None]
)
def test_an_index_names_only_files_of_its_folder(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.safetensors").touch()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json (lists|is not a valid index)"):
        resolve_model(str(folder))


def test_shards_may_be_links_as_in_the_hubs_cache(tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (tmp_path / "blob").touch()
    (folder / "shard.safetensors").symlink_to(tmp_path / "blob")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "shard.safetensors"}}))
    assert resolve_model(str(folder)).files == (folder / "shard.safetensors",)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b'{"a": ' + DEEP, b"\xff\xff", b"[]", b"9" * 5000, b""])
def test_invalid_json(tmp_path, file, content):
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text('{"weight_map": {}}')
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        load_hf_config(resolve_model(str(tmp_path)))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_json_file_that_would_never_end(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        json_file.read_json(tmp_path / name)


def test_a_json_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match=r"config\.json has 19 bytes; at most 10"):
        load_hf_config(resolve_model(str(tmp_path), load_format="dummy"))


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("architectures", "LlamaForCausalLM"), ("architectures", [3]), ("model_type", 7), ("text_config", "x"),
        ("rope_scaling", [1]), ("quantization_config", "fp8"), ("dtype", 3),
    ],
)  # fmt: skip
def test_kinds_of_values_in_config_json(tmp_path, key, wrong):
    (tmp_path / "config.json").write_text(json.dumps({key: wrong}))
    with pytest.raises(ValueError, match=rf"config\.json: {key} is "):
        load_hf_config(resolve_model(str(tmp_path), load_format="dummy"))


@pytest.mark.parametrize("wrong", ["</s>", [1, "2"], 1.5, True, -1, {"a": 1}])
def test_ids_of_end_tokens(tmp_path, wrong):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    checkpoint = resolve_model(str(tmp_path), load_format="dummy")
    with pytest.raises(ValueError, match="eos_token_id is "):
        load_eos_token_ids(checkpoint, {})


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 10**30},
        {"max_position_embeddings": "4096"},
        {"max_position_embeddings": float("inf")},
        {"n_positions": -4},
        {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": float("inf")}},
        {"max_position_embeddings": 2**30, "rope_scaling": {"type": "linear", "factor": 1000}},
        {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}},
    ],
)
def test_absurd_lengths(config):
    with pytest.raises(ValueError, match="must be a"):
        longest_sequence(config)


@pytest.mark.parametrize("size", [True, 0, 10**30, 5.0, "9", None])
def test_absurd_vocabularies(size):
    with pytest.raises(ValueError, match="vocab_size"):
        vocab_size({"vocab_size": size})
