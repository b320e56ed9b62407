"""Validates what prompts hold beside token ids, and names its content for the prefix cache."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from quire.config.shown import shown
from quire.messages.features import EMBEDS, Feature, FeatureSupport, prompt_positions
from quire.messages.requests import ContentKey

MAX_BYTES = 1 << 30  # of a prompt's features
MAX_FEATURES = 1024  # of a prompt
MAX_HASH = 64  # bytes of a content hash
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
PLACEHOLDER = 0  # the token id where a prompt has embeddings instead


def read_embeds(given: Any) -> np.ndarray:
    """vLLM's `prompt_embeds`: a torch tensor or an array, [tokens, hidden]."""
    if hasattr(given, "detach"):
        tensor = given.detach().cpu()
        given = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # numpy has no bfloat16
    if not isinstance(given, np.ndarray):
        raise ValueError(f"prompt_embeds is a {type(given).__name__}; it must be a tensor or an array")
    if given.ndim == 3 and given.shape[0] == 1:
        given = given[0]
    if given.ndim != 2 or not len(given):
        raise ValueError(f"prompt_embeds has shape {list(given.shape)}; it must be [tokens, hidden size]")
    return given


class FeatureChecker:
    def __init__(
        self, support: FeatureSupport | None, embeds_allowed: bool, max_model_len: int, max_positions: int
    ) -> None:
        """`max_positions`: that the model has."""
        self.support = support
        self.embeds_allowed = embeds_allowed
        self.max_model_len = max_model_len
        self.max_positions = max_positions

    def check(self, given: Sequence[Any], num_tokens: int, max_tokens: int | None) -> tuple[Feature, ...]:
        """The features of a prompt of `num_tokens`, in order, with hashes and contiguous data. At most `max_tokens` are
        generated after it."""
        if len(given) > MAX_FEATURES:
            raise ValueError(f"the prompt has {len(given)} features; at most {MAX_FEATURES} are allowed")
        for place, feature in enumerate(given):
            if not isinstance(feature, Feature):
                raise ValueError(f"features[{place}] is a {type(feature).__name__}; it must be a Feature")
            self._check(f"features[{place}]", feature, num_tokens)
        features = sorted(given, key=lambda feature: feature.start)
        for before, after in itertools.pairwise(features):
            if after.start < before.stop:
                raise ValueError(
                    f"features overlap: one is at tokens {before.start} to {before.stop - 1}, "
                    f"another from {after.start} on"
                )
        if (size := sum(feature.data.nbytes for feature in features)) > MAX_BYTES:
            raise ValueError(f"the prompt's features have {size} bytes; at most {MAX_BYTES} are allowed")
        longest = self.max_model_len if max_tokens is None else min(self.max_model_len, num_tokens + max_tokens)
        self._check_reach(features, num_tokens, longest)
        return tuple(_named(feature) for feature in features)

    def _check(self, name: str, feature: Feature, num_tokens: int) -> None:
        if self.support is None:
            raise ValueError("this model's prompts are token ids only; leave features and prompt_embeds out")
        for field in ("start", "length"):
            if type(getattr(feature, field)) is not int:
                raise ValueError(f"{name}.{field} is {shown(getattr(feature, field))}; it must be a whole number")
        if feature.start < 0 or feature.length < 1 or feature.stop > num_tokens:
            raise ValueError(
                f"{name} is at tokens {feature.start} to {feature.stop - 1}; it must be one or more of the prompt's, "
                f"which are 0 to {num_tokens - 1}"
            )
        if not isinstance(feature.data, np.ndarray) or feature.data.dtype.name not in DTYPES or not feature.data.size:
            held = getattr(feature.data, "dtype", type(feature.data).__name__)
            raise ValueError(f"{name}.data is {held}; it must be an array of {', '.join(DTYPES)}, and not empty")
        if feature.data.dtype.kind == "f" and not np.isfinite(feature.data).all():
            raise ValueError(f"{name}.data holds infinity or not-a-number; all numbers must be finite")
        if not isinstance(feature.content_hash, bytes):
            raise ValueError(f"{name}.content_hash is a {type(feature.content_hash).__name__}; it must be bytes")
        if len(feature.content_hash) > MAX_HASH:
            raise ValueError(
                f"{name}.content_hash has {len(feature.content_hash)} bytes; at most {MAX_HASH} are allowed"
            )
        if feature.kind == EMBEDS:
            self._check_embeds(name, feature, self.support)
        elif feature.kind not in self.support.kinds:
            kinds = [*self.support.kinds, EMBEDS]
            raise ValueError(f"{name}.kind is {shown(feature.kind)}; this model has {', '.join(kinds)}")
        elif feature.length > self.support.max_length:
            raise ValueError(
                f"{name} stands in place of {feature.length} tokens; at most {self.support.max_length} are allowed "
                "(--encoder-cache-size)"
            )
        if feature.positions is not None:
            _check_positions(name, feature, self.support, self.max_positions)

    def _check_embeds(self, name: str, feature: Feature, support: FeatureSupport) -> None:
        if not self.embeds_allowed:
            raise ValueError("prompts with embeddings need enable_prompt_embeds=True (--enable-prompt-embeds)")
        expected = (feature.length, support.hidden_size)
        if feature.data.shape != expected:
            raise ValueError(
                f"{name} has embeddings of shape {list(feature.data.shape)}; with this model's hidden size they must "
                f"be {list(expected)}"
            )
        if feature.data.dtype.kind != "f":
            raise ValueError(f"{name} has embeddings of {feature.data.dtype}; they must be floating-point numbers")
        if np.abs(feature.data).max() > np.finfo(np.float32).max:
            raise ValueError(f"{name} has embeddings beyond the range of float32, in which they are kept")

    def _check_reach(self, features: Sequence[Feature], num_tokens: int, longest: int) -> None:
        if all(feature.positions is None for feature in features):
            return
        wide = [msgspec.structs.replace(f, positions=_as_int64(f.positions)) for f in features]
        last = int(prompt_positions(wide, num_tokens).max()) + longest - num_tokens
        if last >= self.max_positions:
            raise ValueError(
                f"with the positions of its features, a request of {longest} tokens reaches position {last}; the model "
                f"has positions up to {self.max_positions - 1}"
            )


def _check_positions(name: str, feature: Feature, support: FeatureSupport, max_positions: int) -> None:
    positions = feature.positions
    if support.position_axes == 1:
        raise ValueError(f"{name}.positions: this model's positions have one axis; leave them out")
    if not isinstance(positions, np.ndarray) or positions.dtype.kind not in "iu":
        raise ValueError(f"{name}.positions must be an array of whole numbers")
    if positions.shape != (3, feature.length) or positions.min() < 0:
        raise ValueError(
            f"{name}.positions has shape {list(positions.shape)}; it must be [3, {feature.length}], from 0 on"
        )
    if int(positions.max()) >= max_positions:  # before anything is added in a type that may be small
        raise ValueError(
            f"{name}.positions reaches {int(positions.max())}; the model has positions up to {max_positions - 1}"
        )


def content_keys(features: Sequence[Feature]) -> tuple[ContentKey, ...]:
    """For the prefix cache: positions change keys and values, as the content does."""
    return tuple(
        ContentKey(
            feature.start,
            feature.stop,
            feature.content_hash + (b"" if feature.positions is None else _digest(feature.positions)),
        )
        for feature in features
    )


def _named(feature: Feature) -> Feature:
    """With contiguous arrays, and a hash that covers kind and length too: the encoder cache is searched by it."""
    data = np.ascontiguousarray(feature.data, feature.data.dtype.newbyteorder("="))
    if feature.kind == EMBEDS:
        data = data.astype(np.float32, copy=False)
    name = f"{feature.kind} {feature.length} ".encode() + (feature.content_hash or _digest(data))
    return msgspec.structs.replace(feature, data=data, content_hash=name, positions=_as_int64(feature.positions))


def _as_int64(positions: np.ndarray | None) -> np.ndarray | None:
    return None if positions is None else np.ascontiguousarray(positions, np.int64)


def _digest(array: np.ndarray) -> bytes:
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.digest()
