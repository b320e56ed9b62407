import numpy as np
import pytest

from quire.core.hashing import BlockHasher, cache_root, make_digest

TOKENS = np.arange(100, dtype=np.int32)


def hashes(tokens=TOKENS, count=100, extra=b"", root=b"root", size=16, digest=None):
    out: list[bytes] = []
    hasher = BlockHasher(size, root, digest) if digest else BlockHasher(size, root)
    hasher.extend(out, tokens, count, extra)
    return out


def test_only_full_blocks_are_hashed_and_growing_gives_the_same_chain():
    assert len(hashes(count=47)) == 2
    grown: list[bytes] = []
    hasher = BlockHasher(16, b"root")
    for count in range(101):
        hasher.extend(grown, TOKENS, count)
    assert grown == hashes()


def test_a_hash_covers_everything_before_it():
    other = TOKENS.copy()
    other[0] = 7
    assert all(a != b for a, b in zip(hashes(), hashes(other), strict=True))
    later = TOKENS.copy()
    later[40] = 7
    assert [a == b for a, b in zip(hashes(), hashes(later), strict=True)] == [True, True, False, False, False, False]


def test_salt_lora_and_model_separate_caches():
    chains = [
        hashes(),
        hashes(extra=b"salt"),
        hashes(root=cache_root("model")),
        hashes(root=cache_root("model", "rev")),
    ]
    assert len({chain[-1] for chain in chains}) == 4


def test_sha256_is_stable_across_processes():
    chain = hashes(root=cache_root("model", "rev"))
    assert chain[1].hex() == "bd76af4b895d2d7b00a8ab3c0633492794106aac8c9c24ed4c230e3c2f1d94ea"


def test_the_fast_hash_is_keyed_by_a_secret_of_the_process():
    pytest.importorskip("xxhash")
    assert hashes(digest=make_digest("xxhash")) != hashes(digest=make_digest("xxhash"))
