"""The packed-weights cache: equal outputs, and never a stale or broken file."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.config import EngineConfig
from quire.config.flags import FlagParser, add_engine_flags, engine_kwargs
from quire.kernels.packed_linear import panel_layout
from quire.models.llama import LlamaForCausalLM
from quire.models.loading import loader, packed_cache
from quire.models.loading.packed_cache import ALIGNMENT
from quire.quantization.fp8_dequantized import DequantizedFp8LinearMethod
from tests.models.helpers import TinyRunner
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.skipif(panel_layout() is None, reason="weights are not packed by our own kernels here")

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return model


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, "quire")


def load(model, folder=None, dtype=torch.bfloat16, load_format="auto", **options):
    checkpoint = resolve_model(str(model), load_format=load_format)
    cache = None if folder is None else str(folder)
    return loader.load_model(
        checkpoint, load_hf_config(checkpoint), dtype, "cpu", packed_weights_cache=cache, **options
    )


def logits(model) -> torch.Tensor:
    torch.manual_seed(0)
    return TinyRunner(model, 1).step([(0, TOKENS)])[0]


def files(folder) -> list:
    return sorted(folder.iterdir()) if folder.exists() else []


def lines(caplog, part: str) -> list[str]:
    """Of the log since the last call."""
    found = [record.getMessage() for record in caplog.records if part in record.getMessage()]
    caplog.clear()
    return found


@pytest.fixture
def unread(monkeypatch):
    """Inside a test, reading the checkpoint fails."""

    def forbidden(*_):
        raise AssertionError("the checkpoint's tensors were read")

    return lambda: [monkeypatch.setattr(loader, name, forbidden) for name in ("open_tensors", "load_weights")]


def outputs(model, **options) -> list:
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
    fixed = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 80, "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(model), **fixed | options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    steps = [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
    return [output.outputs[0].token_ids, steps]


def test_outputs_are_equal_with_a_miss_a_hit_and_no_cache(tiny, folder, caplog, unread):
    plain = outputs(tiny)
    assert outputs(tiny, packed_weights_cache=str(folder)) == plain
    assert len(lines(caplog, f"packed weights written to {folder}")) == 1
    unread()
    assert outputs(tiny, packed_weights_cache=str(folder)) == plain
    assert len(lines(caplog, "weights mapped from the packed cache")) == 1
    assert len(files(folder)) == 1


# A tied head that is packed beside the embedding, and one that is not; biases and LayerNorm; norms of heads.
@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("llama", {"vocab_size": 4096}), ("gpt2", {}), ("cohere-qk-norm", {})]
)
def test_families(tmp_path, folder, unread, family, changes):
    save_tiny(family, tmp_path / "model", **changes)
    plain, missed = load(tmp_path / "model"), load(tmp_path / "model", folder)
    unread()
    hit = load(tmp_path / "model", folder)
    assert hit.mapped_bytes > 0 and missed.mapped_bytes == 0
    assert plain.num_parameters == missed.num_parameters == hit.num_parameters
    assert dict(hit.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert torch.equal(logits(missed), logits(plain)) and torch.equal(logits(hit), logits(plain))


def test_a_tied_head_that_is_not_packed_stays_tied(tmp_path, folder):
    save_tiny("llama", tmp_path / "model", vocab_size=4096)
    load(tmp_path / "model", folder)
    hit = load(tmp_path / "model", folder)
    assert hit.lm_head.weight is hit.embed_tokens.weight


def test_weights_are_mapped_and_aligned(tiny, folder):
    load(tiny, folder)
    hit = load(tiny, folder)
    (file,) = files(folder)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in maps if line.endswith(file.name)]
    panels = hit.layers[1].mlp.down_proj.multiply.data
    for tensor in (panels, hit.norm.weight, hit.embed_tokens.weight):
        assert any(int(start, 16) <= tensor.data_ptr() < int(stop, 16) for start, stop in mapped)
    assert panels.data_ptr() % ALIGNMENT == 0
    with safe_open(file, "pt") as stored:  # the format's own library reads it
        assert torch.equal(stored.get_tensor("layers.1.mlp.down_proj.panels"), panels)


def test_only_the_user_may_read_it(tiny, folder):
    before = os.umask(0)
    try:
        load(tiny, folder)
    finally:
        os.umask(before)
    (file,) = files(folder)
    assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700


def test_the_file_name_depends_on_all_that_weights_depend_on(tiny, tmp_path, folder):
    tiny = shutil.copytree(tiny, tmp_path / "model")
    load(tiny, folder)
    load(tiny, folder, max_model_len=20)  # does not
    assert len(files(folder)) == 1
    checkpoint = tiny / "model.safetensors"
    changed = load_file(checkpoint)
    changed["model.norm.weight"] += 1
    times = checkpoint.stat().st_atime_ns, checkpoint.stat().st_mtime_ns
    save_file(changed, checkpoint, metadata={"format": "pt"})
    os.utime(checkpoint, ns=times)  # as an image has it: the same place, size and time
    assert torch.equal(logits(load(tiny, folder)), logits(load(tiny)))
    assert len(files(folder)) == 2
    (tiny / "config.json").write_text((tiny / "config.json").read_text() + "\n")
    load(tiny, folder)
    assert len(files(folder)) == 3
    checkpoint.rename(tiny / "model-1.safetensors")
    load(tiny, folder)
    assert len(files(folder)) == 4


def test_the_file_name_depends_on_our_source(tiny, tmp_path, folder, monkeypatch):
    assert all((packed_cache.PACKAGE / name).is_dir() for name in packed_cache.CODE_FOLDERS)
    package = tmp_path / "package"
    (package / "kernels" / "native").mkdir(parents=True)
    source = package / "kernels" / "native" / "quantized.py"
    monkeypatch.setattr(packed_cache, "PACKAGE", package)
    for text in ("1", "2"):
        source.write_text(text)
        load(tiny, folder)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "lacks", "extra", "shape"])
def test_a_broken_file_is_packed_again(tiny, folder, caplog, damage):
    plain = logits(load(tiny, folder))
    (file,) = files(folder)
    whole = file.read_bytes()
    tensors = load_file(file)
    match damage:
        case "truncated":
            file.write_bytes(whole[:-100])
        case "empty":
            file.write_bytes(b"")
        case "garbage":
            file.write_bytes(b"\x40" + bytes(7) + b"x" * 1000)
        case "lacks":
            del tensors["layers.2.self_attn.o_proj.panels"]
        case "extra":
            tensors["layers.9.more"] = torch.zeros(4)
        case "shape":
            tensors["layers.2.self_attn.o_proj.panels"] = tensors["layers.2.self_attn.o_proj.panels"][:1].clone()
    if damage in ("lacks", "extra", "shape"):
        save_file(tensors, file)
    caplog.clear()
    assert torch.equal(logits(load(tiny, folder)), plain)
    assert len(lines(caplog, "cannot be used and are packed again")) == 1
    assert torch.equal(logits(load(tiny, folder)), plain)
    assert lines(caplog, "weights mapped") and file.read_bytes() == whole


def test_a_folder_that_cannot_be_written(tiny, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    plain = logits(load(tiny))
    assert torch.equal(logits(load(tiny, tmp_path / "file" / "cache")), plain)
    assert len(lines(caplog, "could not be written")) == 1


def test_unfinished_files_of_killed_processes_are_removed(tiny, folder):
    folder.mkdir()
    old, young = folder / ".a.unfinished", folder / ".b.unfinished"
    old.touch(), young.touch()
    os.utime(old, (1, 1))
    load(tiny, folder)
    assert young.exists() and not old.exists()


def test_a_full_disk_leaves_no_file(tiny, folder, caplog, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    plain = logits(load(tiny))
    monkeypatch.setattr(os, "fsync", full)
    assert torch.equal(logits(load(tiny, folder)), plain)
    assert len(lines(caplog, "No space left")) == 1 and files(folder) == []


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mixtral", {}, "FusedMoE"),
        ("llama", {"quantization": "int8"}, "quantized weights"),
        ("llama", {"dtype": torch.float32}, "float32"),
        ("llama", {"load_format": "dummy"}, "random weights"),
        ("llama", {"model_impl": "transformers"}, "transformers runs"),
    ],
)
def test_models_that_are_not_cached(tmp_path, folder, caplog, family, options, reason):
    save_tiny(family, tmp_path / "model")
    for _ in range(2):
        model = load(tmp_path / "model", folder, **options)
        (line,) = lines(caplog, "--packed-weights-cache has no effect for")
        assert reason in line
    assert files(folder) == []
    if next(model.parameters()).dtype is options.get("dtype", torch.bfloat16):  # as the tiny runner's cache then is
        assert torch.equal(logits(model), logits(load(tmp_path / "model", **options)))


def test_a_quantized_model_runs_without_the_cache(tiny, folder, caplog):
    plain = outputs(tiny, quantization="int8")
    assert outputs(tiny, quantization="int8", packed_weights_cache=str(folder)) == plain
    assert lines(caplog, "has no effect") and files(folder) == []


class MoreAfterLoading(LlamaForCausalLM):
    def process_after_loading(self) -> None:
        super().process_after_loading()
        self.extra = self.norm.weight * 2


def test_a_model_with_its_own_processing_after_loading_is_not_cached(tiny, folder, caplog, monkeypatch):
    monkeypatch.setattr(loader, "model_class", lambda hf: MoreAfterLoading)
    load(tiny, folder)
    assert "a plugin's" in lines(caplog, "has no effect")[0]
    monkeypatch.setattr(MoreAfterLoading, "__module__", "quire.models.more")
    load(tiny, folder)
    assert "MoreAfterLoading (the model)" in lines(caplog, "has no effect")[0] and files(folder) == []


def test_a_method_with_its_own_processing_has_to_declareleaves_panels_only():
    from quire.models.loading.packed_cache import leaves_panels_only
    from quire.quantization.unquantized import UnquantizedLinearMethod

    assert leaves_panels_only(UnquantizedLinearMethod) and leaves_panels_only(LlamaForCausalLM)
    assert not leaves_panels_only(DequantizedFp8LinearMethod)


def test_it_is_refused_on_a_gpu(tiny, folder):
    checkpoint = resolve_model(str(tiny))
    with pytest.raises(ValueError, match="packed_weights_cache is for the CPU"):
        loader.load_model(
            checkpoint, load_hf_config(checkpoint), torch.bfloat16, "cuda", packed_weights_cache=str(folder)
        )


def test_the_flag():
    parser = FlagParser()
    add_engine_flags(parser)
    asked = engine_kwargs(parser.parse(["--packed-weights-cache", "somewhere"]))
    assert EngineConfig.from_kwargs(**asked).load.packed_weights_cache == "somewhere"


def test_a_file_that_others_can_write_to_is_not_mapped(tiny, folder, caplog):
    load(tiny, folder)
    (file,) = files(folder)
    file.chmod(0o666)
    assert load(tiny, folder).mapped_bytes == 0
    assert "others can write to" in lines(caplog, "packed again")[0]
    assert load(tiny, folder).mapped_bytes > 0  # it was replaced


def test_a_folder_that_others_can_write_to_is_not_used(tiny, folder, caplog):
    load(tiny, folder)
    folder.chmod(0o777)
    assert load(tiny, folder).mapped_bytes == 0
    assert "others can write to" in lines(caplog, "could not be written")[0]
