"""Weights saved by each rank and loaded as they are: the same as read from the checkpoint."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.layers.parallel import TensorParallel
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.loading.loader import load_model
from quire.models.loading.sharded_state import save_sharded_state
from quire.models.stage import Stage
from tests.quantization.fp8_checkpoints import block_fp8
from tests.quantization.int_checkpoints import gptq, save_checkpoints
from tests.tiny_models import save_tiny

THREADS = "tests.executor.threads:ThreadsExecutor"


def loaded(folder: Path, load_format: str = "auto", rank: int = 0, size: int = 1, **options: Any) -> LanguageModel:
    checkpoint = resolve_model(str(folder), load_format=load_format)
    dtype = options.pop("dtype", torch.float32)
    return load_model(checkpoint, load_hf_config(checkpoint), dtype, "cpu", TensorParallel(rank, size), **options)


def saved(folder: Path, to: Path, rank: int = 0, size: int = 1, **options: Any) -> LanguageModel:
    model = loaded(folder, rank=rank, size=size, **options)
    save_sharded_state(model, resolve_model(str(folder)), str(to))
    return model


def assert_same(found: LanguageModel, wanted: LanguageModel) -> None:
    assert isinstance(found, DecoderModel) and isinstance(wanted, DecoderModel)
    values = dict(found.named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(values.pop(name), parameter), name
    assert not values


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt2", "mixtral", "deepseek-v2"])
def test_every_rank_loads_its_own_files(tmp_path: Path, family: str) -> None:
    """Fused, transposed and tied weights, experts and shared experts."""
    save_tiny(family, tmp_path / "model", vocab_size=212)
    for rank in range(2):
        model = saved(tmp_path / "model", tmp_path / "state", rank, 2)
        assert_same(loaded(tmp_path / "state", "sharded_state", rank, 2), model)
    assert not list((tmp_path / "state").glob(".*"))


def test_stages(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    for index in range(2):
        stage = Stage(index, 2)
        model = saved(tmp_path / "model", tmp_path / "state", stage=stage)
        assert_same(loaded(tmp_path / "state", "sharded_state", stage=stage), model)
    assert len(list((tmp_path / "state").glob("model-rank-*"))) == 2


def generated(folder: Path, save_to: Path | None = None, **options: Any) -> list[int]:
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=1 << 22, **options)
    if save_to is not None:
        llm.llm_engine.engine_core.save_sharded_state(path=str(save_to), max_size=100_000)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, greedy, use_tqdm=False)
    llm.llm_engine.shutdown()
    return list(output.outputs[0].token_ids)


def test_ranks_of_an_engine(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "model", vocab_size=212)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS, "dtype": "float32"}
    wanted = generated(tmp_path / "model", tmp_path / "state", **ranks)
    sizes = [file.stat().st_size for file in (tmp_path / "state").glob("model-rank-*")]
    assert len(sizes) > 2 and max(sizes) < 110_000
    shutil.rmtree(tmp_path / "model")
    assert generated(tmp_path / "state", load_format="sharded_state", **ranks) == wanted
    with pytest.raises(ValueError, match=r"for another layout \(tensor_parallel_size 2, here 1\); start with that"):
        generated(tmp_path / "state", load_format="sharded_state", dtype="float32")


@pytest.mark.parametrize("made", [gptq(), block_fp8()], ids=["gptq", "fp8 blocks"])
def test_quantized_weights(tmp_path: Path, made: Any) -> None:
    folder, _ = save_checkpoints("llama", tmp_path, made, intermediate_size=128)
    wanted = generated(folder, tmp_path / "state")
    assert generated(tmp_path / "state", load_format="sharded_state") == wanted


def test_scales_of_the_kv_cache(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.self_attn.k_scale"] = torch.tensor([0.25])
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    saved(tmp_path / "model", tmp_path / "state")
    model = loaded(tmp_path / "state", "sharded_state")
    assert model.cache_layers()[1].checkpoint_scales == {"k": 0.25}  # type: ignore[attr-defined]


def rewritten(change: Callable[[dict[str, torch.Tensor]], object], notes: bool = True) -> Callable[[Path], None]:
    def rewrite(file: Path) -> None:
        from quire.checkpoint.safetensors_file import read_file_header

        tensors, kept = load_file(file), read_file_header(file)[1] if notes else {}
        change(tensors)
        save_file(tensors, file, kept)

    return rewrite


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "has no model-rank-0-part-0.safetensors, the weights of rank 0; use as many ranks"),
        (rewritten(lambda t: t.pop("norm.weight")), "do not fit LlamaForCausalLM: they lack norm.weight"),
        (rewritten(lambda t: t.update(more=torch.ones(1))), "they have unknown more"),
        (
            rewritten(lambda t: t.update({"norm.weight": torch.ones(3)})),
            r"norm.weight is F32 \[3\] in the files, but this rank's layer takes F32 \[64\]",
        ),
        (rewritten(lambda t: None, notes=False), "it was not written by save_sharded_state"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    save_tiny("llama", tmp_path / "model")
    saved(tmp_path / "model", tmp_path / "state")
    damage(tmp_path / "state" / "model-rank-0-part-0.safetensors")
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / "state", "sharded_state")


def test_another_type(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    saved(tmp_path / "model", tmp_path / "state")
    with pytest.raises(ValueError, match="dtype 'float32', here 'bfloat16'"):
        loaded(tmp_path / "state", "sharded_state", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="use load_format 'sharded_state'"):
        loaded(tmp_path / "state")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    folder, state = tmp_path / "model", str(tmp_path / "state")
    model, checkpoint = saved(folder, tmp_path / "state"), resolve_model(str(folder))
    with pytest.raises(ValueError, match=r"part-0\.safetensors is there already; give an empty folder"):
        save_sharded_state(model, checkpoint, state)
    with pytest.raises(ValueError, match="is the folder of the checkpoint itself"):
        save_sharded_state(model, checkpoint, str(folder))
    with pytest.raises(ValueError, match="must be a folder"):
        save_sharded_state(model, checkpoint, "")  # not the one that the engine happens to run in
    with pytest.raises(ValueError, match="max_size is 0; it must be a number of bytes"):
        save_sharded_state(model, checkpoint, state, max_size=0)
    with pytest.raises(ValueError, match=re.escape("must be a file name with {rank} and {part} that ends in")):
        save_sharded_state(model, checkpoint, state, pattern="../{rank}-{part}.safetensors")
    with pytest.raises(ValueError, match="not of 'dummy'"):
        save_sharded_state(model, resolve_model(str(folder), load_format="dummy"), state)
    with pytest.raises(ValueError, match="Linear cannot be saved as sharded state"):
        save_sharded_state(torch.nn.Linear(1, 1), checkpoint, state)


def test_sharded_state_is_not_packed_into_a_cache_nor_discarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither knows what the files of one rank hold."""
    save_tiny("llama", tmp_path / "model")
    saved(tmp_path / "model", tmp_path / "state", dtype=torch.bfloat16)
    packed = tmp_path / "packed"
    with LLM(
        str(tmp_path / "state"),
        load_format="sharded_state",
        dtype="bfloat16",
        packed_weights_cache=str(packed),
        enable_sleep_mode=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 22,
    ) as llm:
        assert "sharded state" in caplog.text and not list(packed.glob("*"))
        with pytest.raises(ValueError, match="sharded state cannot be read again yet; sleep at level 1"):
            llm.sleep(level=2)
        assert not llm.is_sleeping()
