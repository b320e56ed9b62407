"""The card's models by name, and the engine settings that its reference numbers were measured with."""

import json
import tarfile
from pathlib import Path
from typing import Any

from quire.bench.internal.anchors import CPU_BARS, H200_BARS, Bar
from quire.bench.internal.card.child import Task
from quire.bench.internal.card.workloads import CPU_WORKLOADS, GPU_WORKLOADS
from quire.bench.workloads import MODEL_SHAPES, TINY_SHAPE
from quire.config import EngineConfig
from quire.models.registry import ARCHITECTURES

SMOLLM2 = "smollm2"  # the embedded model, dequantized to bf16: the same arithmetic as other engines' bf16
SMOLLM2_Q4_1 = "smollm2-q4_1"  # quantized, as stored
EMBEDDED = (SMOLLM2, SMOLLM2_Q4_1)
SMOLLM2_VOCAB = 49152
FP8 = "-fp8"
TINY = "tiny"  # for testing the card: two layers, and a fraction of every workload
ONLY_START_UP = "startup"

GPU_MODELS = [*MODEL_SHAPES, "llama3-8b-fp8"]
CPU_MODELS = [*EMBEDDED, "qwen3-0.6b"]
GPU_DEFAULT = ["qwen3-0.6b", "llama3-8b"]

DUMMY: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
GPU_OPTIONS: dict[str, Any] = {
    "max_model_len": 8192,
    "gpu_memory_utilization": 0.88,
    "seed": 0,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 16384,
    "block_size": 16,
}
SERVER_BATCHED_TOKENS = 8192
CPU_DUMMY: dict[str, Any] = {"max_model_len": 2048}
TINY_OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 16 << 20}


def model_names(given_names: str | None, cpu: bool) -> list[str]:
    allowed = CPU_MODELS if cpu else GPU_MODELS
    names = _listed(given_names) or (CPU_MODELS if cpu else GPU_DEFAULT)
    for name in names:
        if name != TINY and name not in allowed:
            raise ValueError(f"--models: {name!r} is not on this card; allowed: {', '.join(allowed)}")
        if name in (*EMBEDDED, TINY):
            continue
        needs = MODEL_SHAPES[name.removesuffix(FP8)]["architectures"][0]
        if needs not in ARCHITECTURES:
            raise ValueError(f"--models: {name} needs {needs}, which Quire does not have yet; leave {name} out")
    return names


def workload_names(given_names: str | None, model: str, cpu: bool) -> list[str]:
    """Default: the workloads with reference numbers."""
    known = list(CPU_WORKLOADS if cpu else GPU_WORKLOADS)
    names = _listed(given_names)
    for name in names:
        if name not in known and name != ONLY_START_UP:
            raise ValueError(f"--workloads: {name!r} is unknown; allowed: {', '.join([*known, ONLY_START_UP])}")
    if names:
        return [name for name in names if name != ONLY_START_UP]
    rows = bars(model, cpu)
    return [name for name in known if not rows or rows.keys() & {name, f"{name}_ttft", f"{name}_tpot"}]


def bars(model: str, cpu: bool) -> dict[str, Bar]:
    return (CPU_BARS if cpu else H200_BARS).get(model, {})


def make_task(
    model: str,
    folder: Path,
    workloads: list[str],
    given: dict[str, Any],
    *,
    cpu: bool,
    repetitions: int,
    profile_batches: list[int],
) -> Task:
    """`given` engine options override the card's own; the model's config is written under `folder`."""
    options = engine_options(model, folder, cpu) | given
    EngineConfig.from_kwargs(**options)  # invalid options fail here, not in the child
    vocab = SMOLLM2_VOCAB if model in EMBEDDED else shape_of(model)["vocab_size"]
    return Task(model, options, vocab, workloads, repetitions, cpu, model == TINY, profile_batches)


def engine_options(model: str, folder: Path, cpu: bool) -> dict[str, Any]:
    device = {"device": "cpu"} if cpu else {}
    if model in EMBEDDED:
        quantization = "dequantized" if model == SMOLLM2 else "gguf"
        return device | {"skip_tokenizer_init": True, "quantization": quantization}
    options = {"model": write_shape(model, folder)} | DUMMY | device | (CPU_DUMMY if cpu else GPU_OPTIONS)
    if model.endswith(FP8):
        options["quantization"] = "fp8"
    return options | (TINY_OPTIONS if model == TINY else {})


def server_options(options: dict[str, Any], tokenizer: str | None) -> dict[str, Any]:
    """Options for the same model in the server, which needs a tokenizer."""
    made = {name: value for name, value in options.items() if name != "skip_tokenizer_init"}
    if options.get("max_num_batched_tokens") == GPU_OPTIONS["max_num_batched_tokens"]:
        made["max_num_batched_tokens"] = SERVER_BATCHED_TOKENS
    return made | ({"tokenizer": tokenizer} if tokenizer else {})


def shape_of(model: str) -> dict[str, Any]:
    return TINY_SHAPE if model == TINY else MODEL_SHAPES[model.removesuffix(FP8)]


def write_shape(model: str, folder: Path) -> str:
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape_of(model)), "utf-8")
    return str(path)


def unpacked_tokenizer(path: str, folder: Path) -> str:
    """A folder or hub id unchanged; an archive is unpacked."""
    if ".tar" not in Path(path).name:
        return path
    target = folder / "tokenizer"
    with tarfile.open(path) as archive:
        archive.extractall(target, filter="data")
    return str(target)


def _listed(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
