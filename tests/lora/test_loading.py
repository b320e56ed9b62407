"""From the file of an adapter to the numbers of a slot: to the bit what float32 gives, whatever types the two have."""

import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.hashed import PIECE_BYTES, read_hashed
from quire.checkpoint.tensors import pool_of
from quire.lora import ready_memory
from quire.lora.factors import are_finite, bits_of, scaled
from quire.lora.ready_memory import ReadyMemory
from quire.lora.staging import Staging
from quire.models.loading import peft
from quire.models.loading.peft import read_adapter
from quire.models.loading.weight_map import Rule, WeightMap
from tests.checkpoint.test_upload import LateLink

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = WeightMap((Rule("layers.{i}.up.{p}", "layers.{i}.up.{p}"),))
OUT, IN, RANK, LAYERS = 48, 72, 4, 40  # more layers than a thread takes at once
MODULE = "base_model.model.layers.{}.up"


def new_memory(size):
    return np.empty(size, np.uint8)


def tensors(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(LAYERS):
        found[f"{MODULE.format(layer)}.lora_A.weight"] = torch.randn(RANK, IN, generator=generator).to(dtype)
        found[f"{MODULE.format(layer)}.lora_B.weight"] = torch.randn(OUT, RANK, generator=generator).to(dtype)
    return found


def save(folder, given, alpha=3.0, pickled=False):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": alpha}))
    if pickled:
        torch.save(given, folder / "adapter_model.bin")
    else:
        save_file(given, folder / "adapter_model.safetensors")
    return folder


def read(folder, dtype=torch.bfloat16):
    return read_adapter(str(folder), lambda layer, shard: (OUT, IN), new_memory, NAMES, dtype)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("slot", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("alpha", [4.0, 8.0, 3.0])
def test_factors_are_those_of_float32(tmp_path, stored, slot, alpha, pickled):
    given = tensors(stored)
    found = read(save(tmp_path / "a", given, alpha, pickled), slot)
    for layer in range(LAYERS):
        a, b = (given[f"{MODULE.format(layer)}.lora_{which}.weight"].float() for which in "AB")
        for own, wanted in zip(found.factors[f"layers.{layer}.up", None], (a, b * (alpha / RANK)), strict=True):
            assert torch.equal(torch.from_numpy(own), torch.from_numpy(bits_of(wanted.to(slot))))


@pytest.mark.parametrize("slot", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5, 0.3, -1.7, 0.0])
def test_every_half_precision_number(scale, slot):
    """Subnormal numbers, zeros with a sign, those that round to even: all but what is not finite, then or before."""
    for stored in (torch.bfloat16, torch.float16):
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(stored)
        wanted = (every.float() * scale).to(slot)
        kept = wanted.isfinite() & every.isfinite()
        found = scaled(bits_of(every[kept]), stored, scale, slot)
        assert torch.equal(torch.from_numpy(found), torch.from_numpy(bits_of(wanted[kept])))


def test_what_a_type_cannot_hold():
    large = torch.tensor([[1.0, -3e38]])
    with pytest.raises(OverflowError):
        scaled(bits_of(large.bfloat16()), torch.bfloat16, 4.0, torch.bfloat16)
    with pytest.raises(ValueError, match="float16 cannot hold; use --dtype bfloat16"):
        scaled(bits_of(large), torch.float32, 1.0, torch.float16)
    with pytest.raises(ValueError, match="bfloat16 cannot hold; use --dtype float32"):
        scaled(bits_of(torch.tensor([[3.4e38]])), torch.float32, 1.0, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen(dtype):
    limits = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, -1.0], dtype=dtype)
    assert are_finite(bits_of(values), dtype)
    for wrong in (float("inf"), float("-inf"), float("nan"), -float("nan")):
        for place in range(len(values)):
            changed = values.clone()
            changed[place] = wrong
            assert not are_finite(bits_of(changed), dtype)


def test_the_content_is_that_of_the_file_whatever_the_threads(tmp_path, monkeypatch):
    given = tensors(torch.bfloat16)
    first = f"{MODULE.format(0)}.lora_A.weight"
    same = [read(save(tmp_path / "a", given))]
    monkeypatch.setattr(peft, "_num_threads", lambda beside_steps: 4)
    same.append(read(save(tmp_path / "copy", given)))
    assert len({adapter.content for adapter in same}) == 1
    assert all((same[0].factors[key][1] == same[1].factors[key][1]).all() for key in same[0].factors)
    bit = {first: given[first].clone()}
    bit[first].view(torch.int16)[0, 0] ^= 1
    others = {
        "bit": save(tmp_path / "bit", given | bit),
        "type": save(tmp_path / "type", {name: t.view(torch.float16) for name, t in given.items()}),
        "name": save(tmp_path / "name", {n.replace("layers.7.", "layers.70."): t for n, t in given.items()}),
        "scale": save(tmp_path / "scale", given, alpha=4.0),
        "pickled": save(tmp_path / "pickled", given, pickled=True),
    }
    assert len({read(folder).content for folder in others.values()} | {same[0].content}) == 1 + len(others)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_is_hashed_in_pieces(tmp_path, threads):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(2 * PIECE_BYTES + 5))
    with pool_of(1, "alone") as alone, pool_of(threads, "test") as pool:
        data, hashes = read_hashed(file, pool, new_memory)
        assert data.tobytes() == file.read_bytes() and len(set(hashes)) == 3
        assert hashes == read_hashed(file, alone, new_memory)[1]


def test_a_file_that_is_cut_short_meanwhile(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1000))

    class Pool:
        def map(self, read, pieces):
            os.truncate(file, 10)
            return map(read, pieces)

    with pytest.raises(ValueError, match="is cut short"):
        read_hashed(file, Pool(), new_memory)


def test_a_pickled_file_that_is_cut_short_meanwhile(tmp_path, monkeypatch):
    folder, load = save(tmp_path / "a", tensors(torch.bfloat16), pickled=True), torch.load
    right = read(folder)

    def cut_short(*arguments, **options):
        content = load(*arguments, **options)
        os.truncate(folder / "adapter_model.bin", 10)
        return content

    monkeypatch.setattr(torch, "load", cut_short)
    assert read(folder).content == right.content


def test_numbers_that_are_seen_as_many(tmp_path):
    numbers = torch.ones(RANK * 1000)
    many = {f"{MODULE.format(i)}.lora_A.weight": numbers.view(RANK, 1000) for i in range(4)}
    with pytest.raises(ValueError, match=r"up to .* the tensors are larger than adapter_model.bin"):
        read(save(tmp_path / "a", many, pickled=True))


def test_files_that_are_large_for_nothing(tmp_path, monkeypatch):
    """What has no tensor, and what memory has no room for, is not read."""
    folder = save(tmp_path / "a", tensors(torch.bfloat16))
    file, right = folder / "adapter_model.safetensors", read(folder).content
    monkeypatch.setattr(peft, "MOST_UNSEEN", 1000)
    assert read(folder).content == right
    with monkeypatch.context() as full:
        full.setattr(peft, "available_memory", lambda: file.stat().st_size - 1)
        with pytest.raises(ValueError, match=r"bytes; \d+ are free in memory"):
            read(folder)
    os.truncate(file, file.stat().st_size + 1)
    with pytest.raises(ValueError, match="more than its tensors"):
        read(folder)
    (folder / "adapter_config.json").write_text(" " * (peft.MAX_CONFIG_BYTES + 1))
    with pytest.raises(ValueError, match="has 16777217 bytes; at most 16777216 are read"):
        read(folder)


def test_a_folder_of_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = save(tmp_path / "a", tensors(torch.bfloat16))
    assert read("~/a").content == read(folder).content


def test_small_copies_share_a_buffer_and_wait_for_what_is_in_it():
    link = LateLink()
    staging = Staging([link.buffer(256), link.buffer(256)], link.copy, link.mark)
    shapes = [(3, 5), (40, 4), (1, 128), (9, 7), (200, 3), (2, 2)]
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    wide = [torch.zeros(len(values), values.shape[1] + 3, dtype=values.dtype) for values in given]
    for values, slot in zip(given, wide, strict=True):
        staging.copy(values, slot[:, : values.shape[1]])
    link.mark().synchronize()
    for values, slot in zip(given, wide, strict=True):
        assert torch.equal(slot[:, : values.shape[1]], values) and not slot[:, values.shape[1] :].any()


def test_memory_is_ready_for_files_as_large_as_the_last():
    memory = ReadyMemory()
    memory.prepare()
    assert len(memory.take(100_000)) == 100_000
    memory.prepare()
    assert memory.take(100_000).base is None, "it was not loaded"
    memory.expect(100_000)
    memory.prepare()
    ready = memory._ready
    assert memory.take(98_000).base is ready and memory.take(98_000).base is None
    memory.prepare()
    assert memory.take(98_000).base is None, "nothing was loaded since"
    memory.expect(98_000)
    memory.prepare()
    assert [memory.take(size).base for size in (50_000, 98_000)] == [None, None]


@pytest.mark.parametrize(("threads", "part"), [(1, 40_000), (2, 20_000), (4, 10_000)])
def test_a_file_that_comes_first_takes_memory_of_which_a_part_is_ready(monkeypatch, threads, part):
    monkeypatch.setattr(ready_memory, "PART_BYTES", part)
    memory = ReadyMemory(threads)
    memory.expect(100_000)
    assert [memory.prepare() for _ in range(4)] == [True, True, False, False]
    assert memory.take(100_000).base is not None and not memory.prepare()
    memory.expect(100_000)
    assert memory.prepare()
    assert memory.take(100_000).base is not None, "a part of it"
    assert not memory.prepare(), "it is another's now"


def test_memory_that_no_thread_can_touch_is_taken_as_it_is():
    memory = ReadyMemory(threads=2)
    memory._pool.shutdown()
    memory.expect(10 << 20)
    assert not memory.prepare()
    assert len(memory.take(10 << 20)) == 10 << 20


def test_memory_that_cannot_be_had_is_done_without(monkeypatch):
    memory = ReadyMemory()
    memory.expect(ready_memory.MOST + 1)
    memory.prepare()
    assert not len(memory._ready)

    def full(*_):
        raise MemoryError

    memory.expect(1000)
    monkeypatch.setattr(ready_memory, "np", SimpleNamespace(empty=full, uint8=np.uint8))
    memory.prepare()
    assert not len(memory._ready)


def test_the_content_has_the_places_that_tensors_are_taken_from(tmp_path, monkeypatch):
    """A trainer saves anew between the reading of the header and of the rest."""
    folder = save(tmp_path / "a", tensors(torch.bfloat16))
    right = read(folder)
    entries = peft.read_entries

    def of_before(file):
        return [dataclasses.replace(e, start=e.start - 8, stop=e.stop - 8) for e in entries(file)]

    monkeypatch.setattr(peft, "read_entries", of_before)
    assert read(folder).content != right.content
