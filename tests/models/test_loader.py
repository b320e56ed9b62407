import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.layers.parallel import TensorParallel
from quire.models.llama import LlamaForCausalLM
from quire.models.loading import progress
from quire.models.loading.loader import load_model
from quire.models.loading.weight_loader import init_dummy_weights, load_weights
from quire.models.options import ModelOptions
from tests.models.helpers import CPU, MemoryTensor, TinyRunner, tensors_of
from tests.models.references import LONGROPE, SMALL, build_reference
from tests.tiny_models import save_tiny


def tiny(**differences) -> LlamaForCausalLM:
    return LlamaForCausalLM(SMALL | differences, ModelOptions(torch.float32, CPU))


@pytest.fixture(scope="module")
def tensors() -> list[MemoryTensor]:
    return tensors_of(build_reference("llama"))


def test_missing_tensor_is_named(tensors):
    kept = [t for t in tensors if t.name != "model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load_weights(tiny(), kept)


def test_many_missing_tensors_are_counted():
    with pytest.raises(ValueError, match=r"and [0-9]+ more"):
        load_weights(tiny(), [])


def test_unknown_tensor_is_named(tensors):
    bias = MemoryTensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(48))
    with pytest.raises(ValueError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias, vision\.weight"):
        load_weights(tiny(), [*tensors, bias, MemoryTensor("vision.weight", torch.zeros(1))])


def test_misshapen_tensor_is_named(tensors):
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight has shape \[97, 48\].*\[98, 48\]"):
        load_weights(tiny(vocab_size=98), tensors)


def test_ignored_tensors_may_be_present(tensors):
    model = tiny(tie_word_embeddings=True)
    embedding = next(tensor.data for tensor in tensors if tensor.name == "model.embed_tokens.weight")
    given = [MemoryTensor(t.name, embedding) if t.name == "lm_head.weight" else t for t in tensors]
    load_weights(model, [*given, MemoryTensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))])
    assert model.lm_head.weight is model.embed_tokens.weight


def test_workers_hold_slices_of_the_whole(tensors):
    whole = tiny()
    load_weights(whole, tensors)
    halves = []
    for rank in range(2):
        half = LlamaForCausalLM(SMALL, ModelOptions(torch.float32, CPU, TensorParallel(rank, 2)))
        load_weights(half, tensors)
        halves.append(half.layers[0])
    layer = whole.layers[0]
    down = torch.cat([half.mlp.down_proj.weight for half in halves], dim=1)
    assert torch.equal(down, layer.mlp.down_proj.weight)
    sizes, local = layer.self_attn.qkv_proj.out_partition_sizes, halves[0].self_attn.qkv_proj.out_partition_sizes
    full_parts = layer.self_attn.qkv_proj.weight.split(sizes)
    half_parts = [half.self_attn.qkv_proj.weight.split(local) for half in halves]
    for full, first, second in zip(full_parts, *half_parts, strict=True):
        assert torch.equal(full, torch.cat((first, second)))


def test_random_weights_depend_on_the_seed_alone():
    first, second, other = tiny(), tiny(), tiny()
    for model, seed in ((first, 7), (second, 7), (other, 8)):
        init_dummy_weights(model, seed)
    assert torch.equal(first.embed_tokens.weight, second.embed_tokens.weight)
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)
    assert torch.equal(first.norm.weight, torch.ones(48))


def test_a_failing_read_names_its_tensor(tensors):
    class Broken(MemoryTensor):
        def read_into(self, out):
            raise RuntimeError("no such page")

    broken = [Broken(tensors[0].name, tensors[0].data), *tensors[1:]]
    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight could not be read .*no such page"):
        load_weights(tiny(), broken)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_load_model_from_a_folder(tmp_path, safe):
    reference = build_reference("qwen3")
    reference.save_pretrained(tmp_path)
    if not safe:  # transformers 5 no longer writes these
        (tmp_path / "model.safetensors").unlink()
        torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    ckpt = resolve_model(str(tmp_path))
    assert ckpt.format == ("safetensors" if safe else "pt")
    model = load_model(ckpt, reference.config.to_dict(), torch.float32, "cpu")
    tokens = [3, 1, 4, 1, 5, 9]
    (logits,) = TinyRunner(model, 1).step([(0, tokens)])
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)


def test_truncated_file_names_the_tensor(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({t.name: t.data.contiguous() for t in tensors_of(build_reference("llama"))}, file)
    file.write_bytes(file.read_bytes()[:-10])
    ckpt = Checkpoint("tiny", "safetensors", tmp_path, (file,))
    with pytest.raises(ValueError, match=r"truncated \(tensor model\.norm\.weight ends"):
        load_model(ckpt, SMALL | {"architectures": ["LlamaForCausalLM"]}, torch.float32, "cpu")


def test_load_model_from_a_gguf():
    ckpt = resolve_model(None)
    model = load_model(ckpt, load_hf_config(ckpt), torch.float32, "cpu", quantization="dequantized")
    stored = {tensor.name: tensor for tensor in open_tensors(ckpt)}

    def read(name: str) -> torch.Tensor:
        out = torch.empty(stored[name].shape)
        stored[name].read_into(out)
        return out

    assert torch.equal(model.embed_tokens.weight, read("model.embed_tokens.weight"))
    assert torch.equal(model.norm.weight, read("model.norm.weight"))
    layer, prefix = model.layers[29], "model.layers.29"
    qkv = torch.cat([read(f"{prefix}.self_attn.{part}_proj.weight") for part in "qkv"])
    assert torch.equal(layer.self_attn.qkv_proj.weight, qkv)
    assert torch.equal(layer.mlp.down_proj.weight, read(f"{prefix}.mlp.down_proj.weight"))


def test_load_model_with_dummy_weights(tmp_path):
    hf = SMALL | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    ckpt = Checkpoint("tiny", "dummy", tmp_path, ())
    first, second, other = (load_model(ckpt, hf, torch.float32, "cpu", seed=seed) for seed in (3, 3, 4))
    weights = [model.layers[2].self_attn.qkv_proj.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.layers[0].self_attn.q_norm.weight.eq(1).all()
    (logits,) = TinyRunner(first, 1).step([(0, [1, 2, 3])])
    assert logits.isfinite().all()


def test_max_model_len_reaches_the_rope(tmp_path):
    hf = SMALL | {"architectures": ["LlamaForCausalLM"]}
    hf["rope_parameters"] = LONGROPE | {"original_max_position_embeddings": 16}
    ckpt = Checkpoint("tiny", "dummy", tmp_path, ())
    short, long = (load_model(ckpt, hf, torch.float32, "cpu", max_model_len=n) for n in (16, None))
    assert short.config.ropes[0].scaling.factors == tuple(LONGROPE["short_factor"])
    assert long.config.ropes[0].scaling.factors == tuple(LONGROPE["long_factor"])


def test_engine_options_leave_the_checkpoints_config_alone(tmp_path):
    hf = SMALL | {"architectures": ["LlamaForCausalLM"]}
    ckpt = Checkpoint("tiny", "dummy", tmp_path, ())
    model = load_model(ckpt, dict(hf), torch.float32, "cpu", max_model_len=16, moe_backend="torch")
    assert model.hf == hf


def test_progress_counts_bytes(tmp_path, monkeypatch, caplog):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "TOLD_FROM", 1)  # bytes
    ckpt = resolve_model(str(tmp_path))
    with caplog.at_level("INFO", "quire"):
        load_model(ckpt, load_hf_config(ckpt), torch.float32, "cpu", progress=True)
    assert re.search(r"Loading weights: 100%.* (\d+)k/\1k .*B/s", terminal.getvalue())
    assert re.search(r"weights: 0\.0 GB read in .* s \(.* GB/s\)", caplog.text)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("state", ["fresh", "used"])
def test_peak_memory_is_little_more_than_the_model(state):
    """In a process of its own; "used": one whose allocator has seen large buffers come and go."""
    script = Path(__file__).with_name("peak_memory.py")
    done = subprocess.run([sys.executable, script, state], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, model = map(int, done.stdout.split())
    assert model == 269_030_016
    assert model < peak < 1.6 * model  # a second copy would be 2
