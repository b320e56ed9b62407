"""Prompts of /v1/completions that are embeddings: tensors as torch.save writes them, in base64."""

import binascii
import io
import pickle
from base64 import b64decode
from typing import Any

from quire.engine.input_processor import ParsedPrompt
from quire.engine.prompt_features import MAX_BYTES, PLACEHOLDER, read_embeds
from quire.messages.features import EMBEDS, Feature


def read_prompt_embeds(encoded: str) -> ParsedPrompt:
    embeds = read_embeds(_tensor(encoded))
    return ParsedPrompt(None, [PLACEHOLDER] * len(embeds), features=[Feature(EMBEDS, 0, len(embeds), embeds)])


def _tensor(encoded: str) -> Any:
    import torch  # the server needs it for nothing else

    try:
        held = io.BytesIO(b64decode(encoded, validate=True))
        with torch.sparse.check_sparse_tensor_invariants():  # indices out of range would write anywhere
            tensor = torch.load(held, map_location="cpu", weights_only=True)
    except (binascii.Error, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError):
        raise ValueError("prompt_embeds is not a tensor as torch.save writes it, in base64") from None
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise ValueError("prompt_embeds must hold one tensor of floating-point numbers")
    if tensor.numel() * tensor.element_size() > MAX_BYTES:  # of a sparse tensor, before it becomes a dense one
        raise ValueError(f"prompt_embeds holds more than {MAX_BYTES} bytes")
    return tensor.to_dense()
