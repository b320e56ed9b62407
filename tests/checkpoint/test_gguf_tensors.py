import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from quire.checkpoint import gguf_file, resolve_model
from quire.checkpoint.tensors import open_tensors, reader_pool
from tests.checkpoint.gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, random_floats, write_gguf


def open_one(path: Path):
    (tensor,) = open_tensors(resolve_model(str(path)))
    return tensor


def read(tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(tensor.shape, float("nan"), dtype=dtype)
    tensor.read_into(out)
    return out


@pytest.fixture
def small_slices(monkeypatch):
    """Slices so small that every tensor takes several."""
    monkeypatch.setattr(gguf_file, "SLICE_ELEMENTS", 3 * HIDDEN)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_equal_the_reference(tmp_path, small_slices, kind, dtype):
    stored = gguf.quants.quantize(random_floats(17, HIDDEN), kind)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (stored, kind)})
    tensor = open_one(path)
    assert (tensor.name, tensor.shape) == ("model.layers.0.mlp.up_proj.weight", (17, HIDDEN))
    expected = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    assert torch.equal(read(tensor, dtype), expected.to(dtype))


def can_dequantize(kind: Type) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return kind not in (Type.F32, Type.F16)  # stored as they are; compared above


QUANTIZED = [kind for kind in Type if can_dequantize(kind)]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")  # random scales include infinity
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.0.attn_q.weight"])
def test_any_bytes_equal_the_reference(tmp_path, small_slices, kind, name):
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(1).integers(0, 256, (HEADS * HEAD_DIM, HIDDEN // size * nbytes), dtype=np.uint8)
    tensor = open_one(write_gguf(tmp_path / "m.gguf", {name: (stored, kind)}))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, kind)
    assert expected.shape == (HEADS * HEAD_DIM, HIDDEN) and np.isfinite(expected).mean() > 0.5
    if "attn_q" in name:
        expected = from_interleaved(expected, HEADS)
    assert torch.allclose(read(tensor), torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)


def test_the_reference_knows_all_families():
    names = {kind.name for kind in QUANTIZED}
    assert {"BF16", "Q5_1", "Q2_K", "Q3_K", "TQ1_0", "MXFP4", "IQ1_M", "IQ2_XXS", "IQ3_S", "IQ4_NL"} <= names


def from_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def to_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The reordering of q and k rows that llama.cpp's converter does: rotary pairs side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_llama_rope_rows_are_put_back_in_order(tmp_path, small_slices, part, heads):
    weight = random_floats(heads * HEAD_DIM, HIDDEN)
    bias = random_floats(heads * HEAD_DIM)
    path = write_gguf(
        tmp_path / "m.gguf",
        {
            f"blk.0.attn_{part}.weight": (to_interleaved(weight, heads), None),
            f"blk.0.attn_{part}.bias": (to_interleaved(bias, heads), None),
        },
    )
    loaded = {tensor.name: read(tensor) for tensor in open_tensors(resolve_model(str(path)))}
    assert torch.equal(loaded[f"model.layers.0.self_attn.{part}_proj.weight"], torch.from_numpy(weight))
    assert torch.equal(loaded[f"model.layers.0.self_attn.{part}_proj.bias"], torch.from_numpy(bias))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_families_are_in_order_already(tmp_path, architecture):
    weight = random_floats(HEADS * HEAD_DIM, HIDDEN)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (weight, None)}, architecture=architecture)
    assert torch.equal(read(open_one(path)), torch.from_numpy(weight))


def test_names(tmp_path):
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.12.attn_norm.weight": "model.layers.12.input_layernorm.weight",
        "blk.12.attn_q_norm.weight": "model.layers.12.self_attn.q_norm.weight",
        "blk.12.attn_v.bias": "model.layers.12.self_attn.v_proj.bias",
        "blk.12.attn_output.weight": "model.layers.12.self_attn.o_proj.weight",
        "blk.12.ffn_norm.weight": "model.layers.12.post_attention_layernorm.weight",
        "blk.12.ffn_gate.weight": "model.layers.12.mlp.gate_proj.weight",
    }
    tensors = {name: (random_floats(32), None) for name in [*names, "rope_freqs.weight"]}
    ckpt = resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors)))
    assert [tensor.name for tensor in open_tensors(ckpt)] == list(names.values())


def test_unknown_tensor_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ssm_in.weight": (random_floats(32), None)})
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_in\.weight is not known"):
        open_one(path)


def test_experts_are_tensors_of_their_own(tmp_path):
    experts = random_floats(3, 8, 32)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (experts, None)})
    found = list(gguf_file.open_gguf(path))
    assert [t.name for t in found] == [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(3)]
    for tensor, expert in zip(found, experts, strict=True):
        out = torch.empty(8, 32)
        tensor.read_into(out)
        assert torch.equal(out, torch.from_numpy(expert))


def test_experts_of_two_dimensions_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (random_floats(8, 32), None)})
    with pytest.raises(ValueError, match=r"ffn_up_exps\.weight has the shape \[8, 32\]"):
        open_one(path)


def test_type_that_cannot_be_dequantized_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (np.zeros((4, 292), np.uint8), Type.Q8_K)})
    with pytest.raises(ValueError, match=r"output\.weight has type Q8_K"):
        open_one(path)


@pytest.mark.parametrize("kept", [0, 3, 10, 30, 100, 400, -1])
def test_truncated_file(tmp_path, kept):
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (random_floats(64, 64), None)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"m\.gguf (is corrupt or truncated|is not a GGUF)"):
        open_one(path)


def test_damaged_header_is_an_error_and_not_a_crash(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (random_floats(8, 32), None)})
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(good)
        for position in rng.integers(4, 700, 4):
            bad[position] = rng.integers(0, 256)
        path.write_bytes(bad)
        try:
            open_one(path)
        except ValueError as error:
            assert "m.gguf" in str(error)


def test_a_large_tensor_is_read_in_small_slices(tmp_path):
    stored = np.zeros((8192, 2048 // 32 * 20), np.uint8)  # 64 MiB as float32
    tensor = open_one(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (stored, Type.Q4_1)}))
    largest = 0
    dequantize = tensor._dequantize

    def watched(blocks: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        values = dequantize(blocks)
        largest = max(largest, values.nbytes)
        return values

    tensor._dequantize = watched
    assert not read(tensor, torch.bfloat16).any()
    assert 0 < largest <= 16 * 2**20


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_the_embedded_model_takes_little_more_than_the_model():
    threads = torch.get_num_threads()
    tensors = list(open_tensors(resolve_model(None)))
    assert len(tensors) == 272
    outs = [torch.ones(tensor.shape, dtype=torch.bfloat16) for tensor in tensors]  # ones: resident from the start
    size = sum(out.nbytes for out in outs)
    before = peak = anonymous_memory()
    with reader_pool(2) as pool:
        for done in [pool.submit(tensor.read_into, out) for tensor, out in zip(tensors, outs, strict=True)]:
            done.result()
            peak = max(peak, anonymous_memory())
    assert peak - before < 0.6 * size  # a copy of it all would be 1
    assert torch.get_num_threads() == threads
    norm = next(out for tensor, out in zip(tensors, outs, strict=True) if tensor.name == "model.norm.weight")
    assert norm.shape == (576,) and not torch.equal(norm, torch.ones_like(norm))


def test_a_single_reader_is_the_caller():
    """What it allocates is in the caller's memory pool, which sleep mode gives back."""
    with reader_pool(1) as pool:
        assert pool.submit(threading.get_ident).result() == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()
    with reader_pool(2) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
