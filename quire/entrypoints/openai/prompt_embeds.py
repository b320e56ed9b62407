"""Prompts of /v1/completions that are embeddings: tensors as torch.save writes them, in base64."""

import binascii
import io
import pickle
import zipfile
from base64 import b64decode
from typing import Any

from quire.engine.input_processor import ParsedPrompt
from quire.engine.prompt_features import PLACEHOLDER, read_embeds
from quire.messages.features import EMBEDS, Feature

SPARSE_BYTES = 1 << 26  # of a sparse tensor made dense; others may not be larger than what is sent
NO_TENSOR = "prompt_embeds is not a tensor as torch.save writes it, in base64"


def read_prompt_embeds(encoded: str) -> ParsedPrompt:
    embeds = read_embeds(_tensor(encoded))
    return ParsedPrompt(None, [PLACEHOLDER] * len(embeds), features=[Feature(EMBEDS, 0, len(embeds), embeds)])


def _tensor(encoded: str) -> Any:
    import torch  # the server needs it for nothing else

    try:
        sent = b64decode(encoded, validate=True)
        with zipfile.ZipFile(io.BytesIO(sent)) as archive:
            inflated = sum(entry.file_size for entry in archive.infolist())
        if inflated > len(sent):
            raise ValueError("compressed")
        with torch.sparse.check_sparse_tensor_invariants():  # indices out of range would write anywhere
            tensor = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=True)
    except (binascii.Error, zipfile.BadZipFile, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError):
        raise ValueError(NO_TENSOR) from None
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise ValueError("prompt_embeds must hold one tensor of floating-point numbers")
    most = len(sent) if tensor.layout is torch.strided else SPARSE_BYTES
    if tensor.numel() * tensor.element_size() > most:
        raise ValueError(f"prompt_embeds makes more than {most} bytes of numbers")
    return tensor.to_dense()
