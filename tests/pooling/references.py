"""A tiny model, prompts, and what transformers' hidden states of them are pooled to."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.tiny_models import prompts, save_tiny

LENGTHS = (1, 5, 16, 40, 90, 120)
ARGUMENTS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 25,
    "max_model_len": 256,
    "max_num_seqs": 8,
}


@dataclass
class PoolingReference:
    path: str
    prompts: list[list[int]]
    hidden: list[torch.Tensor]  # [tokens, hidden], after the final norm

    def vectors(self, pooling_type: str, dimensions: int | None = None, normalize: bool = True) -> list[np.ndarray]:
        return [finished(pool(pooling_type, hidden), dimensions, normalize) for hidden in self.hidden]


def pool(pooling_type: str, hidden: torch.Tensor) -> torch.Tensor:
    match pooling_type:
        case "LAST":
            return hidden[-1]
        case "CLS":
            return hidden[0]
        case "MEAN":
            return hidden.mean(dim=0)
        case "LARGEST":
            return hidden.amax(dim=0)
    raise ValueError(pooling_type)


def finished(vector: torch.Tensor, dimensions: int | None, normalize: bool) -> np.ndarray:
    vector = vector[:dimensions]
    return (vector / vector.norm() if normalize else vector).numpy()


def make_pooling_reference(family: str, folder: Path) -> PoolingReference:
    model = save_tiny(family, folder)
    # The last two share a prefix.
    given = [*prompts(LENGTHS), [*prompts(LENGTHS)[-1][:60], 3, 4, 5]]
    with torch.inference_mode():
        hidden = [model.base_model(torch.tensor([ids])).last_hidden_state[0].float() for ids in given]
    return PoolingReference(str(folder), given, hidden)


def assert_close(outputs, vectors, tolerance: float = 1e-4) -> None:
    for i, (output, vector) in enumerate(zip(outputs, vectors, strict=True)):
        assert output.finished and output.error is None
        assert output.outputs.data.dtype == np.float32 and output.outputs.data.shape == vector.shape
        assert np.abs(output.outputs.data - vector).max() < tolerance, f"prompt {i}"
