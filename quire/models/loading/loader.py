"""Builds a model and loads its weights from the checkpoint."""

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from quire.checkpoint.heap import large_buffers_mapped
from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import CheckpointTensor, open_tensors
from quire.checkpoint.upload import UPLOAD_THREADS, CudaLink, Upload
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.base import LanguageModel
from quire.models.implementation import choose_implementation
from quire.models.loading.progress import LoadProgress
from quire.models.loading.sharded_state import load_sharded_state
from quire.models.loading.weight_loader import init_dummy_weights, load_weights
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.models.stage import WHOLE, Stage
from quire.quantization.base import RegroupsTensors
from quire.quantization.select import choose_quantization

if TYPE_CHECKING:
    from quire.models.decoder import DecoderModel

logger = logging.getLogger("quire")


def check_splits(family: "type[DecoderModel]") -> None:
    """ValueError if the models of a family cannot be built from a range of layers."""
    from quire.models.decoder import DecoderModel

    ours = issubclass(family, DecoderModel) and family.forward is DecoderModel.forward
    if not ours or family.feature_kinds:
        what = "has encoders" if ours else "has a forward pass of its own"
        raise ValueError(
            f"{family.__name__} {what} and cannot be split into stages yet; use one (--pipeline-parallel-size 1)"
        )


def load_model(
    ckpt: Checkpoint,
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel = SINGLE,
    progress: bool = False,
    seed: int = 0,
    max_model_len: int | None = None,
    quantization: str | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    code_revision: str | None = None,
    moe_backend: str = "auto",
    longest: int | None = None,
    packed_weights_cache: str | None = None,
    threads: int | None = None,
    state_pattern: str | None = None,
    stage: Stage = WHOLE,
    backbone: bool = False,
) -> LanguageModel:
    """The model of `hf_config` with the checkpoint's weights, ready for inference.

    `seed` is for dummy weights. `max_model_len` is the user's limit, by which longrope chooses its factors; `longest`
    the model's own, used without one. `quantization` is the user's option; None: as in the checkpoint. `model_impl`:
    see models/implementation.py. `packed_weights_cache`: a folder (packed_cache.py). `threads` read weights; None: a
    sane number. `state_pattern`: names of sharded state's files. `stage`: only its layers are read.
    `backbone`: of a model that pools, whose checkpoint may be saved without prefix and with heads (pooling/heads.py).
    """
    device = torch.device(device)
    if packed_weights_cache and device.type != "cpu":
        raise ValueError(
            "packed_weights_cache is for the CPU, where weights are packed; on a GPU leave it out "
            "(--packed-weights-cache)"
        )
    choice = choose_implementation(hf_config, model_impl, trust_remote_code, ckpt.is_gguf)
    if choice.impl is None:
        raise ValueError(choice.reason)
    if choice.impl == "transformers":
        from quire.models.transformers.model import load_transformers_model

        if ckpt.format == "sharded_state":
            raise ValueError("a model that transformers runs has no sharded state; load its checkpoint")
        if stage.count > 1:
            raise ValueError(
                "a model that transformers runs cannot be split into stages; use one (--pipeline-parallel-size 1)"
            )
        if packed_weights_cache:
            from quire.models.loading.packed_cache import warn_no_effect

            warn_no_effect("a model that transformers runs")
        with large_buffers_mapped():
            return load_transformers_model(
                ckpt,
                hf_config,
                dtype,
                device,
                quantization=quantization,
                trust_remote_code=trust_remote_code,
                code_revision=code_revision,
                longest=max_model_len or longest,
                seed=seed,
                progress=progress,
                tp=tp,
            )
    quantized = choose_quantization(quantization, hf_config, dtype, device, is_gguf=ckpt.format == "gguf")
    if quantized.describe():
        logger.info(quantized.describe())
    shared = (tp.rank, tp.size) if stage.count == 1 else (tp.rank, tp.size, str(stage))
    cache_key = (hf_config, shared, quantization, quantized.describe())  # beside dtype and files
    options = ModelOptions(dtype, device, tp, quantized, max_model_len, moe_backend, stage)

    def build() -> "DecoderModel":
        family = model_class(hf_config)
        if stage.count > 1:
            check_splits(family)
        try:
            return family(hf_config, options)
        except RuntimeError as error:
            if device.type != "cpu" or "allocate" not in str(error):
                raise
            raise ValueError(f"the model's config needs more memory than there is: {error}") from error

    upload = None
    if device.type == "cuda":
        threads = threads or min(UPLOAD_THREADS, os.cpu_count() or 1)
        upload = Upload(CudaLink(device), threads)
    with large_buffers_mapped():
        model = build()
        cache = None
        if packed_weights_cache:
            from quire.models.loading.packed_cache import open_cache

            cache = open_cache(packed_weights_cache, model, ckpt, dtype, cache_key)
        if cache is not None and cache.exists:
            if cache.map_into(model):
                return model.eval()
            model = build()  # the first may be partially filled
        if ckpt.format == "dummy":
            init_dummy_weights(model, seed)
        elif ckpt.format == "sharded_state":
            load_sharded_state(model, ckpt.path, state_pattern, upload, threads, progress)
        else:
            if packed_weights_cache:
                read_ahead(ckpt.files)  # not started by the worker, since a cache hit needs no checkpoint
            with LoadProgress(ckpt.files, progress) as bar:
                tensors: Iterable[CheckpointTensor] = bar.counted(open_tensors(ckpt, upload))
                if isinstance(quantized, RegroupsTensors):
                    tensors = quantized.regroup(tensors)
                load_weights(model, tensors, quantized.ignored, backbone, threads)
                if upload is not None:
                    upload.wait()
        model.process_after_loading()
        if cache is not None:
            cache.write(model)
    return model.eval()
