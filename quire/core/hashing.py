"""Names for KV-cache content: a block's hash covers its tokens and everything before it."""

import hashlib
import secrets
from collections.abc import Callable

import numpy as np

Digest = Callable[[bytes], bytes]


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
    """Hashes a request's tokens block by block, each block's hash being the parent of the next."""

    def __init__(self, block_size: int, root: bytes, digest: Digest = _sha256) -> None:
        self.block_size = block_size
        self.root = root
        self.digest = digest

    def extend(self, hashes: list[bytes], token_ids: np.ndarray, num_tokens: int, extra: bytes = b"") -> None:
        """Append the hashes of the full blocks in token_ids[:num_tokens] that `hashes` does not have yet.

        `extra` (LoRA, cache salt) enters the first block, and through its hash all that follow.
        """
        size, digest, first = self.block_size, self.digest, len(hashes)
        count = num_tokens // size - first
        if count <= 0:
            return
        data = token_ids[first * size : (first + count) * size].tobytes()
        width = len(data) // count
        parent = hashes[-1] if hashes else self.root + extra
        for at in range(0, len(data), width):
            parent = digest(parent + data[at : at + width])
            hashes.append(parent)
