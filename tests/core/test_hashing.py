import numpy as np
import pytest

from quire.config import ModelConfig
from quire.config.speculative import SpeculativeConfig
from quire.core import hashing
from quire.core.engine_core import kv_fingerprint
from quire.core.hashing import BlockHasher, cache_root, make_digest
from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup
from quire.messages.requests import ContentKey
from tests.core.fake_engine import spec

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


def test_prompts_that_repeat_others_get_the_hashes_of_one_that_was_never_seen(monkeypatch):
    size, draw = 4, np.random.default_rng(0)
    monkeypatch.setattr(hashing, "MAX_STRETCHED_TOKENS", 3 * size * hashing.STRETCH)
    hasher, first = BlockHasher(size, b"root"), draw.integers(0, 9, 2 * size * hashing.STRETCH + 30, np.int32)
    for same in (0, 1, size * hashing.STRETCH, len(first) - 1, len(first), 7, len(first)):
        prompt = np.concatenate([first[:same], draw.integers(0, 9, len(first) - same, np.int32)])
        for extra in (b"", b"salt"):
            grown: list[bytes] = []
            for count in (50, len(prompt)):
                hasher.extend(grown, prompt, count, extra)
            whole: list[bytes] = []
            hasher.extend(whole, prompt, len(prompt), extra)
            assert grown == whole == hashes(prompt, len(prompt), extra, size=size)
            assert len(hasher._stretches) <= 3


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


LONGROPE = {"rope_scaling": {"rope_type": "longrope", "long_factor": [4.0], "short_factor": [1.0]}}
LAYOUT = KVCacheConfig(8, (KVCacheGroup((0,), spec()),))


def fingerprint(hf_config=None, kv_cache_dtype="auto", layout=LAYOUT, **options):
    model = ModelConfig(model="m", **options)
    model.hf_config = hf_config or {}
    return kv_fingerprint(model, kv_cache_dtype, layout, SpeculativeConfig())


def test_whatever_changes_keys_and_values_changes_the_fingerprint():
    found = [
        fingerprint(),
        fingerprint(revision="main"),
        fingerprint(dtype="float16"),
        fingerprint(quantization="int8"),
        fingerprint(quantization="int4"),
        fingerprint(hf_overrides={"rope_theta": 5.0}),
        fingerprint(kv_cache_dtype="fp8"),
        fingerprint(layout=KVCacheConfig(8, (KVCacheGroup((0,), spec().with_scales("float32")),))),
        fingerprint(layout=KVCacheConfig(8, (KVCacheGroup((0,), spec(4, window=6)),))),
    ]
    assert len(set(found)) == len(found)


def test_the_longest_sequence_counts_where_longrope_chooses_its_factors_by_it():
    assert fingerprint(LONGROPE, max_model_len=4096) != fingerprint(LONGROPE, max_model_len=8192)
    assert fingerprint(LONGROPE) != fingerprint(LONGROPE, max_model_len=8192)
    assert fingerprint(max_model_len=4096) == fingerprint(max_model_len=8192)  # nothing else does


def test_sha256_is_stable_across_processes():
    chain = hashes(root=cache_root("model", "rev"))
    assert chain[1].hex() == "bd76af4b895d2d7b00a8ab3c0633492794106aac8c9c24ed4c230e3c2f1d94ea"


def test_the_fast_hash_is_keyed_by_a_secret_of_the_process():
    pytest.importorskip("xxhash")
    assert hashes(digest=make_digest("xxhash")) != hashes(digest=make_digest("xxhash"))


def test_content_keys_enter_the_blocks_that_hold_their_tokens():
    def keyed(*keys):
        out: list[bytes] = []
        BlockHasher(16, b"root").extend(out, TOKENS, 100, b"", [ContentKey(*key) for key in keys])
        return [a == b for a, b in zip(out, hashes(), strict=True)]

    assert keyed((32, 33, b"k")) == [True, True, False, False, False, False]
    assert keyed((31, 32, b"k")) == [True, False, False, False, False, False]
    assert keyed((96, 100, b"k")) == [True] * 6  # its block is not full yet
    assert keyed() == [True] * 6
