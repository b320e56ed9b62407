"""The engine's options for building a model; everything else comes from the checkpoint's Hugging Face config."""

from dataclasses import dataclass

import torch

from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.stage import WHOLE, Stage
from quire.quantization.base import Quantization
from quire.quantization.unquantized import UNQUANTIZED


@dataclass(frozen=True)
class ModelOptions:
    """Built once by the loader (models/loading/loader.py), passed to the model's constructor."""

    dtype: torch.dtype  # of computation
    device: torch.device
    tp: TensorParallel = SINGLE
    quantization: Quantization = UNQUANTIZED
    max_model_len: int | None = None  # the user's limit; None: what the checkpoint's positions allow
    moe_backend: str = "auto"  # kernels of experts (layers/moe_backend.py)
    stage: Stage = WHOLE  # of a pipeline
