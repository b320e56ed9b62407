"""Pairs of tiny models that differ in their weights alone, and their greedy tokens."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from tests.tiny_models import prompts, save_tiny

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24, "cpu_threads": 1,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": prompt} for prompt in prompts((5, 17, 50))]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@cache
def two_models(family: str, **overrides: Any) -> tuple[str, str]:
    """Folders of two checkpoints: as saved, and with other weights."""
    folder = Path(mkdtemp(prefix=f"quire-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = save_tiny(family, folder / "old", **overrides)
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=numbers))
    model.save_pretrained(folder / "new")
    return str(folder / "old"), str(folder / "new")


def state_of(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@cache
def tokens_of(folder: str, **arguments: Any) -> list[list[int]]:
    """Of an engine started with these weights."""
    with LLM(folder, **ENGINE, **arguments) as llm:
        return tokens(llm)
