"""`--batch-invariant` on a GPU: a loaded model gets kernels with which a row's bits do not depend on other rows."""

import torch
from torch import nn

from quire.config import EngineConfig
from quire.kernels.moe_table import FLOAT32, INVARIANT
from quire.layers.attention import Attention
from quire.layers.embedding import LMHead
from quire.layers.fused_moe import FusedMoE
from quire.layers.linear import ParallelLinear
from quire.layers.packed_experts import PackedExperts
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.quantization.unquantized import InvariantLinearMethod, UnquantizedLinearMethod

BACKEND = "triton_invariant"
ANY_ROWS = 1 << 31
KERNEL_ROW_COUNTS = tuple(1 << i for i in range(12))  # at which tiles, or programs for their slabs, change


def invariant_backend(requested: str | None) -> str:
    """The attention backend of the mode; ValueError if another was requested."""
    if requested not in (None, BACKEND):
        raise refused(f"attention backend {requested!r} adds keys in an order of its own; leave it out")
    return BACKEND


def check_invariant(config: EngineConfig) -> None:
    """Before loading: ValueError names the option that does not go with the mode."""
    if config.pooling.setup is not None:
        raise refused("models that pool have no such kernels yet")
    if config.lora.enable_lora:
        raise refused("adapters (--enable-lora) have no such kernels yet")
    if config.speculative.method not in (None, "ngram", "suffix"):
        raise refused(f"speculative method {config.speculative.method!r} has layers of its own; use ngram or suffix")


def make_invariant(model: LanguageModel) -> None:
    """Once weights are loaded; ValueError names what has no such kernels."""
    name = type(model).__name__
    if not isinstance(model, DecoderModel) or not model.cache_layers():
        raise refused(f"{name} has no such kernels yet: only decoders that generate")
    for layer in model.cache_layers():
        if not isinstance(layer, Attention):
            raise refused(f"{type(layer).__name__} of {name} has no such kernels yet")
    for module in model.modules():
        if isinstance(module, (ParallelLinear, LMHead)):
            module.method = _invariant_method(module.method)
        elif isinstance(module, FusedMoE):
            if module.backend.name != "triton":
                raise refused(f"experts are multiplied by {module.backend.name}; use --moe-backend triton")
            module.tiles = FLOAT32 if module.down.dtype is torch.float32 else INVARIANT
        elif isinstance(module, PackedExperts):
            raise refused(f"{type(module).__name__}, quantized experts, have no such kernels yet; use {_DEQUANTIZED}")
        elif isinstance(module, nn.Linear):
            raise refused(f"{name} has layers of torch's")
    # Fused layers or not, but the same for all numbers of rows.
    model.max_fused_rows = ANY_ROWS if model.max_fused_rows_of_layers() else 0
    model.kernel_row_counts = tuple(sorted({*model.kernel_row_counts, *KERNEL_ROW_COUNTS}))


_DEQUANTIZED = "--quantization dequantized, or an unquantized checkpoint"


def _invariant_method(method: object) -> InvariantLinearMethod:
    if type(method) not in (UnquantizedLinearMethod, InvariantLinearMethod):
        raise refused(f"{type(method).__name__}, of quantized weights, has no such kernel yet; use {_DEQUANTIZED}")
    return InvariantLinearMethod()


def refused(why: str) -> ValueError:
    return ValueError(f"batch_invariant is not possible on a GPU here: {why} (--batch-invariant)")
