"""Names for KV-cache content: a block's hash covers its tokens and everything before it."""

import hashlib
import secrets
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.messages.requests import ContentKey

Digest = Callable[[bytes], bytes]
CONTENT_MARK = b"\xff\xff\xff\xff"
STRETCH = 32  # blocks
MAX_STRETCHED_TOKENS = 1 << 20  # 9 MB with blocks of 16 tokens


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def make_digest(algorithm: str) -> Digest:
    if algorithm == "sha256":
        return _sha256
    try:
        import xxhash
    except ImportError:
        raise ValueError("prefix_caching_hash_algo 'xxhash' needs the package xxhash: pip install xxhash") from None
    # Not collision resistant: a secret seed keeps clients from making two prompts collide on purpose.
    seed = secrets.randbits(64)
    return lambda data: xxhash.xxh3_128_digest(data, seed=seed)


def cache_root(*facts: str) -> bytes:
    """Fingerprint of all that makes KV content comparable; `engine_core.kv_fingerprint` lists the facts."""
    return _sha256("\0".join(facts).encode())


class BlockHasher:
    """Hashes a request's tokens block by block, each block's hash being the parent of the next.

    Prompts that hit repeat what others began with, so the hashes of stretches that were hashed lately are kept, by
    parent and tokens: they are looked up in a quarter of the time, and equal hashes are one object.
    """

    def __init__(self, block_size: int, root: bytes, digest: Digest = _sha256) -> None:
        self.block_size = block_size
        self.root = root
        self.digest = digest
        self._stretches: dict[tuple[bytes, bytes], list[bytes]] = {}  # the least recently used first

    def extend(
        self,
        hashes: list[bytes],
        token_ids: np.ndarray,
        num_tokens: int,
        extra: bytes = b"",
        content: Sequence[ContentKey] = (),
    ) -> None:
        """Append the hashes of the full blocks in token_ids[:num_tokens] that `hashes` does not have yet.

        `extra` (LoRA, cache salt) enters the first block, and through its hash all that follow; a key of `content`
        enters the blocks that hold any of its tokens.
        """
        size, digest, first = self.block_size, self.digest, len(hashes)
        count = num_tokens // size - first
        if count <= 0:
            return
        data = token_ids[first * size : (first + count) * size].tobytes()
        width = len(data) // count
        parent = hashes[-1] if hashes else self.root + extra
        whole = 0 if content else count // STRETCH * STRETCH * width
        for at in range(0, whole, STRETCH * width):
            hashes += self._stretch(parent, data[at : at + STRETCH * width], width)
            parent = hashes[-1]
        for at in range(whole, len(data), width):
            if content:
                start = (first + at // width) * size
                parent = self._with_content(parent, start, content)
            parent = digest(parent + data[at : at + width])
            hashes.append(parent)

    def _stretch(self, parent: bytes, data: bytes, width: int) -> list[bytes]:
        """Hashes of STRETCH blocks."""
        key = (parent, data)
        found = self._stretches.pop(key, None)
        if found is None:
            found, digest = [], self.digest
            for at in range(0, len(data), width):
                parent = digest(parent + data[at : at + width])
                found.append(parent)
            if (len(self._stretches) + 1) * STRETCH * self.block_size > MAX_STRETCHED_TOKENS and self._stretches:
                del self._stretches[next(iter(self._stretches))]
        self._stretches[key] = found
        return found

    def _with_content(self, parent: bytes, start: int, content: Sequence[ContentKey]) -> bytes:
        """The parent of the block at token `start`; another one if the block holds content."""
        held = [
            (key.start - start, key.key) for key in content if key.start < start + self.block_size and start < key.stop
        ]
        # The mark is no token id, so no block's tokens can pass for keys.
        return self.digest(parent + CONTENT_MARK + msgspec.msgpack.encode(held)) if held else parent
