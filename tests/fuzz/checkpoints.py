"""Mutated checkpoint files: each loads or raises a ValueError, within limits on time and memory."""

import itertools
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.child import ChildTarget
from tests.fuzz.mutate import NASTY, dumps, mutated_bytes, mutated_value

SECONDS, MEGABYTES = 20.0, 512
MAX_PARAMETERS = 300_000  # larger models are not built
NASTY_NUMBERS = (0, 1, 3, 7, 8, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
SIZES = (0, -1, 1, 2, 3, 5, 7, 8, 17, 33, 64, 257, 1024, 4000, 2**31, 0.5, 0.3, 1.5, 8.0, 1e-9, 1e30, True, "8", None)
SEPARATOR = b"\n\x00\x00\n"  # between tokenizer.json and tokenizer_config.json


class CheckpointTarget(ChildTarget):
    seconds, megabytes = SECONDS, MEGABYTES


class SafetensorsTarget(CheckpointTarget):
    name, function = "safetensors", "tests.fuzz.checkpoints:check_safetensors"

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        tensors = {
            "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
        }
        words = (*NASTY, *NASTY_NUMBERS, *SIZES, "F64", "F8_E4M3", [0, 24], [33, 33], [2, 3, 0])
        while True:
            header: Any = {"__metadata__": {"format": "pt"}} | tensors
            for _ in range(rng.choice((1, 1, 2, 3))):
                header = mutated_value(rng, header, words)
            text = dumps(header).encode("utf-8", "surrogatepass")
            length = len(text) if rng.random() < 0.95 else rng.choice(NASTY_NUMBERS)
            data = length.to_bytes(8, "little") + text + rng.randbytes(33)
            yield mutated_bytes(rng, data) if rng.random() < 0.2 else data


def check_safetensors(data: bytes) -> str:
    import torch

    from quire.checkpoint.safetensors_file import open_safetensors

    with temporary("model.safetensors", data) as file:
        try:
            for tensor in open_safetensors((file,)):
                out = torch.empty(tensor.shape, dtype=torch.float32)
                if tensor.dtype != "F8_E8M0":
                    tensor.read_into(out)
        except ValueError as error:
            return unclear(error, file.name)
    return ""


class GgufTarget(CheckpointTarget):
    name, function = "gguf", "tests.fuzz.checkpoints:check_gguf"

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        seeds = [gguf_seed(kind) for kind in ("gpt2", "llama")]
        while True:
            data = rng.choice(seeds)
            for _ in range(rng.choice((1, 1, 2, 4))):
                data = self._mutated(rng, data)
            yield data

    def _mutated(self, rng: random.Random, data: bytes) -> bytes:
        """Numbers of all widths at any place; most of a header is numbers."""
        if rng.random() < 0.3 or len(data) < 64:
            return mutated_bytes(rng, data)
        code = rng.choice("BHIQ")
        number = struct.pack(f"<{code}", rng.choice(NASTY_NUMBERS) % 2 ** (8 * struct.calcsize(code)))
        at = rng.randrange(len(data) - len(number))
        return data[:at] + number + data[at + len(number) :]


def gguf_seed(kind: str) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def encoded(value: Any) -> bytes:
        match value:
            case bool():
                return struct.pack("<I?", 7, value)
            case int():
                return struct.pack("<II", 4, value)
            case float():
                return struct.pack("<If", 6, value)
            case str():
                return struct.pack("<I", 8) + text(value)
        inner, count = encoded(value[0])[:4], struct.pack("<Q", len(value))
        return struct.pack("<I", 9) + inner + count + b"".join(encoded(item)[4:] for item in value)

    tokens = ["<unk>", "<s>", "</s>", "▁", "h", "i", "hi", "▁hi"] if kind == "llama" else ["h", "i", "hi", "Ġ", "<s>"]
    values = {
        "general.architecture": "llama", "general.alignment": 32, "llama.context_length": 64,
        "llama.embedding_length": 32, "llama.block_count": 1, "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": [1], "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0, "tokenizer.ggml.model": kind, "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3], "tokenizer.ggml.merges": ["h i"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    tensors = [("token_embd.weight", (32, len(tokens)), 0), ("blk.0.attn_q.weight", (32, 32), 8)]
    tensors += [
        ("blk.0.attn_k.weight", (32, 16), 2),
        ("output_norm.weight", (32,), 1),
        ("blk.0.ffn_up.weight", (256,), 12),
    ]
    sizes = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144)}
    body, data = b"", b""
    for name, shape, type_id in tensors:
        elements, size = sizes[type_id]
        body += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, len(data))
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        data += bytes(-(-count // elements * size // 32) * 32)
    metadata = b"".join(text(key) + encoded(value) for key, value in values.items())
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + metadata + body
    return header + bytes(-len(header) % 32) + data


def check_gguf(data: bytes) -> str:
    import torch

    from quire.checkpoint.gguf_config import gguf_eos_token_ids, gguf_to_hf_config
    from quire.checkpoint.gguf_file import open_gguf
    from quire.checkpoint.gguf_header import read_header
    from quire.tokenizer.gguf import build_gguf_tokenizer

    with temporary(f"model-{next(_numbers)}.gguf", data) as file:  # headers are remembered by their names
        try:
            header = read_header(file)
            config = gguf_to_hf_config(header)
            gguf_eos_token_ids(header)
            for tensor in open_gguf(file):
                tensor.read_into(torch.empty(tensor.shape))
            tokenizer = build_gguf_tokenizer(header)
            tokenizer.decode(tokenizer.encode("hi hi"))
        except ValueError as error:
            return unclear(error, file.name)
        return check_family(config)


class ConfigTarget(CheckpointTarget):
    name, function = "config", "tests.fuzz.checkpoints:check_config"

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        seeds = config_seeds()
        while True:
            config: Any = rng.choice(seeds)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                config = mutated_value(rng, config, (*SIZES, *SIZES, *NASTY))
            yield dumps(config).encode("utf-8", "surrogatepass")


def config_seeds() -> list[dict[str, Any]]:
    """A small model of every family of our own, and of one that transformers runs."""
    from tests.tiny_models import COMMON, FAMILIES

    others = {"GPT2Config": "GPT2LMHeadModel", "Gemma3TextConfig": "Gemma3ForCausalLM"}
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    seeds = []
    for config, differences in FAMILIES.values():
        architecture = others.get(config, config.replace("Config", "ForCausalLM"))
        activation = {"hidden_act": "gelu"} if architecture in ("GPTNeoXForCausalLM", "FalconForCausalLM") else {}
        seed = {**COMMON, **small, **activation, **differences, "architectures": [architecture], "head_dim": 16}
        seeds.append({key: value for key, value in seed.items() if value is not None})
    llama = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 128}
    for kind, more in {
        "linear": {}, "dynamic": {}, "yarn": {"beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.0},
    }.items():  # fmt: skip
        seeds.append(seeds[0] | {"rope_scaling": {"rope_type": kind, "factor": 2.0} | llama | more})
    scheme = {"type": "float", "num_bits": 8, "symmetric": True}
    groups = {"targets": ["Linear"], "weights": scheme | {"strategy": "channel"}}
    groups["input_activations"] = scheme | {"strategy": "token", "dynamic": True}
    for quantization in (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16], "ignored_layers": ["x"]},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:lm_.*"],
         "config_groups": {"group_0": groups}},
    ):  # fmt: skip
        seeds.append(seeds[0] | {"quantization_config": quantization})
    return seeds


def check_config(data: bytes) -> str:
    from quire.checkpoint.config import check_kinds
    from quire.checkpoint.json_file import parse_object
    from quire.engine.resolve_config import longest_sequence, vocab_size

    try:
        config = parse_object(data, "config.json")
        check_kinds(config, "config.json")
        longest_sequence(config)
        vocab_size(config)
    except ValueError:
        return ""
    return check_family(config)


def check_family(hf: dict[str, Any]) -> str:
    try:
        run_family(hf)
    except ValueError as error:
        return "" if str(error) else "an error without words"
    return ""


def run_family(hf: dict[str, Any]) -> None:
    """Read by its family and, where it is small, built, filled and run for two steps in both precisions."""
    import torch

    from quire.attention.native import NativeBackend
    from quire.checkpoint.resolve import Checkpoint
    from quire.config.values import whole_number
    from quire.kernels import native
    from quire.kernels.paged_attention import AttentionShape
    from quire.messages.kv_cache import FullAttentionSpec
    from quire.models.config_checks import count_parameters
    from quire.models.loading.loader import load_model
    from quire.models.registry import ModelRegistry, model_class
    from tests.models.helpers import TinyRunner

    torch.set_num_threads(1)
    if ModelRegistry.find(hf) is None:
        return
    read = model_class(hf).read_config(hf)
    tables = sum(rope.max_positions * rope.rotary_dim for rope in {*read.ropes} - {None} if rope)
    experts = whole_number("num_experts", hf.get("num_experts") or hf.get("num_local_experts") or 1)
    if (count_parameters(read) + tables) * min(experts, 100) > MAX_PARAMETERS:
        return
    for dtype in (torch.bfloat16, torch.float32):
        model = load_model(Checkpoint("x", "dummy", Path("x"), ()), hf, dtype, "cpu", model_impl="quire")
        runner = TinyRunner(model, 1)
        keyed = all(isinstance(layer.kv_cache_spec(4, dtype), FullAttentionSpec) for layer in model.cache_layers())
        fits = keyed and native.attention_fits(read.num_heads, read.num_kv_heads, read.head_dim)
        if dtype is torch.bfloat16 and fits:
            shape = AttentionShape(read.num_heads, read.num_kv_heads, read.head_dim)
            runner.backend = NativeBackend([shape])
            for layer in model.cache_layers():
                layer.backend = runner.backend
        tokens = [1 % read.vocab_size] * 5
        longest = model.max_positions
        runner.step([(0, tokens[:longest])])
        if longest is None or longest > len(tokens):
            runner.step([(0, tokens[:1])])


class TokenizerTarget(CheckpointTarget):
    name, function = "tokenizer", "tests.fuzz.checkpoints:check_tokenizer"

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        seeds = tokenizer_seeds()
        config = {
            "bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}",
            "added_tokens_decoder": {"9": {"content": "<x>", "special": True, "lstrip": False}},
        }  # fmt: skip
        while True:
            tokenizer: Any = rng.choice(seeds)
            settings: Any = config
            for _ in range(rng.choice((1, 1, 2, 3))):
                if rng.random() < 0.7:
                    tokenizer = mutated_value(rng, tokenizer, (*NASTY, *SIZES))
                else:
                    settings = mutated_value(rng, settings, NASTY)
            parts = [dumps(part).encode("utf-8", "surrogatepass") for part in (tokenizer, settings)]
            yield SEPARATOR.join(mutated_bytes(rng, part) if rng.random() < 0.05 else part for part in parts)


def tokenizer_seeds() -> list[dict[str, Any]]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = {letter: i for i, letter in enumerate("heloĠ")}
    bpe = Tokenizer(models.BPE(vocab=letters | {"he": 5, "hel": 6}, merges=[("h", "e"), ("he", "l")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁he", -1.0), ("l", -2.0), ("lo", -2.5)], unk_id=0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    pieces = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Split("l+", "isolated")
    for backend in (bpe, unigram, pieces):
        backend.add_special_tokens(["<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 7)])
    return [json.loads(backend.to_str()) for backend in (bpe, unigram, pieces)]


def check_tokenizer(data: bytes) -> str:
    from quire.checkpoint.resolve import Checkpoint
    from quire.checkpoint.special_tokens import tokenizer_eos_id
    from quire.tokenizer.load import load_tokenizer

    tokenizer_json, _, config = data.partition(SEPARATOR)
    with temporary("tokenizer.json", tokenizer_json) as file:
        (file.parent / "tokenizer_config.json").write_bytes(config or b"{}")
        try:
            tokenizer_eos_id(file.parent)
            tokenizer = load_tokenizer(Checkpoint("x", "dummy", file.parent, ()))
            ids = tokenizer.encode("hello world </s>")
            tokenizer.decode(ids)
        except ValueError as error:
            return unclear(error, "")
    return ""


_numbers = itertools.count()


class temporary:
    """A file of that name and content in a folder of its own."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data = name, data

    def __enter__(self) -> Path:
        self.folder = Path(
            tempfile.mkdtemp(prefix="quire-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        file = self.folder / self.name
        file.write_bytes(self.data)
        return file

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def unclear(error: ValueError, name: str) -> str:
    """Empty if it says what is wrong, and with which file."""
    return "" if str(error) and name in str(error) else f"an unclear error: {error!r}"
