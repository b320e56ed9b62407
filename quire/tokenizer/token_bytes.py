"""What each token adds to the text, in bytes.

A decoder that only concatenates its tokens can run one token at a time: the detokenizer concatenates bytes, and an
incremental UTF-8 decoder holds back incomplete characters. Two families do so: byte-level BPE, and SentencePiece with
byte fallback.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    from quire.tokenizer.fallback import SlowBackend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE uses for bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(token: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()  # an added token, stored as text


def sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def decoder_bytes(backend: "tokenizers.Tokenizer | SlowBackend") -> tuple[Callable[[str], bytes], bool] | None:
    """How this tokenizer's decoder turns a token into bytes, and whether it drops one space at the start of the text.

    None for decoders that do more than concatenate (WordPiece, CTC, ...): those must decode windows of tokens.
    """
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return byte_level_bytes, False
    steps: list[dict[str, Any]] = decoder.get("decoders", [])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["pattern"] == {"String": "▁"}:
        if kinds == ["Replace", "ByteFallback", "Fuse"]:
            return sentencepiece_bytes, False
        if steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
            return sentencepiece_bytes, True
    return None
