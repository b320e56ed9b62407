"""Decoding rows of many keys, which are split into parts for several threads."""

import itertools
import platform

import pytest
import torch

from quire.attention.base import StepInputs
from quire.attention.native import NativeBackend
from quire.kernels import native
from quire.kernels.native.build import library
from quire.kernels.native.replay import Recording
from quire.kernels.paged_attention import AttentionShape, paged_attention
from tests.attention.mixes import FEATURES, make_features, paged_batch

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

WHOLE = 2048  # the most keys that are one task
LENGTHS = (WHOLE, WHOLE + 1, WHOLE + 2, 4500)
# Queries one by one, packed, and neither; in the last, heads are too many to be attended to together.
SHAPES = [(6, 2, 64), (10, 2, 32), (4, 2, 24), (49, 49, 16)]
LIBRARIES = {"this machine": (), "amx": ("-DQUIRE_EMULATE_AMX",)}
if platform.machine() == "x86_64":
    LIBRARIES["portable"] = ("-march=x86-64",)
SCALE = 0.3  # few keys have most of the weight, and parts differ in their greatest score


@pytest.fixture(params=LIBRARIES)
def compiled(request, monkeypatch):
    """Makes `native.attention` that of another machine too."""
    flags = LIBRARIES[request.param]
    if not flags:
        return
    made = library(*flags, only=("attention.c", "amx.c", "linear.c", "threads.c")).quire_attention
    made.argtypes = native.bound("quire_attention").argtypes
    original = native.native_function
    monkeypatch.setattr(native, "has_amx", lambda: request.param == "amx")
    monkeypatch.setattr(native, "native_function", lambda name: made if name == "quire_attention" else original(name))


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def decoding(*lengths):
    return [(length - 1, 1) for length in lengths]


def check_close(ours, wanted):
    """By how large outputs are, which are means of many values."""
    limit = 0.02 if ours.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(ours.float(), wanted.float(), atol=limit * wanted.float().std().item(), rtol=limit)


@pytest.mark.parametrize("features", ["", *FEATURES])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
def test_equals_plain_attention(compiled, features, heads, kv_heads, head_size):
    dtypes = (torch.bfloat16, torch.float32) if head_size == 24 else (torch.bfloat16,)
    for dtype, window in itertools.product(dtypes, (None, 2500, 100)):
        batch = paged_batch(decoding(*LENGTHS), 16, heads, kv_heads, head_size, dtype, window)
        layer_features = make_features(features, heads, SCALE, window)
        check_close(native.attention(*batch, layer_features), paged_attention(*batch, layer_features))


def test_more_keys_than_the_most_parts_have_of_the_usual_size():
    for length in (32 * 1024 - 1, 32 * 1024, 50_001):
        batch = paged_batch(decoding(length, 3), 16, 3, 1, 32, torch.bfloat16)
        layer_features = make_features("", 3, SCALE)
        check_close(native.attention(*batch, layer_features), paged_attention(*batch, layer_features))


@pytest.mark.parametrize("features", ["", *FEATURES])
def test_a_long_prefix_that_all_rows_share(compiled, features):
    shared, own = 4096, (1, 70, 2500, 3)
    q, cache, places, starts, lens, table = paged_batch(
        decoding(*(shared + n for n in own)), 16, 6, 2, 64, torch.bfloat16
    )
    table[:, : shared // 16] = table[places[0], : shared // 16].clone()
    batch, layer_features = (q, cache, places, starts, lens, table), make_features(features, 6, SCALE)
    ours = native.attention(*batch, layer_features, shared=shared)
    check_close(ours, paged_attention(*batch, layer_features))
    assert torch.equal(native.attention(*batch, layer_features, slots(64, 6, 64), shared), ours)


def slots(count, heads, head_size):
    return torch.empty(count * heads * (head_size + 2))


def of_rows(batch, chosen):
    q, cache, places, starts, lens, table = batch
    kept = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
    counts = starts.diff()[chosen]
    return (q[kept], cache, places[chosen], torch.cat((starts[:1], counts.cumsum(0))).int(), lens[chosen], table), kept


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch_on_any_number_of_threads(
    compiled, set_threads, heads, kv_heads, head_size
):
    rows = [*decoding(4500, 30, 2300), (200, 20), *decoding(WHOLE, 9000, 5)]
    batch = paged_batch(rows, 16, heads, kv_heads, head_size, torch.bfloat16)
    layer_features = make_features("sinks", heads, SCALE)
    set_threads(2)
    together = native.attention(*batch, layer_features)
    for threads in (1, 2, 3, 16):
        set_threads(threads)
        assert torch.equal(native.attention(*batch, layer_features), together)
        for chosen in ([0], [5], [4], [2, 5], [6, 3, 0], [1, 6, 4]):
            some, kept = of_rows(batch, chosen)
            assert torch.equal(native.attention(*some, layer_features), together[kept])


@pytest.mark.parametrize("num_slots", [64, 66, 80])
def test_fewer_slots_than_parts(num_slots):
    batch = paged_batch([*decoding(*([50_000] + [2100, 60] * 20)), (30, 9)], 16, 3, 1, 32, torch.bfloat16)
    layer_features = make_features("", 3, SCALE)
    wanted = native.attention(*batch, layer_features)
    assert torch.equal(native.attention(*batch, layer_features, slots(num_slots, 3, 32)), wanted)


def test_too_few_slots_are_refused():
    batch = paged_batch(decoding(5), 16, 3, 1, 32, torch.bfloat16)
    with pytest.raises(ValueError, match="sizes that it cannot serve"):
        native.attention(*batch, make_features("", 3, SCALE), slots(63, 3, 32))


@pytest.mark.parametrize("window", [None, 1000])
def test_only_rows_of_many_keys_are_split(window):
    memory = slots(1024, 6, 64).fill_(7)
    for lengths, split in (((WHOLE, 40, 1), False), ((40, WHOLE + 1), window is None)):
        batch = paged_batch(decoding(*lengths), 16, 6, 2, 64, torch.bfloat16, window)
        native.attention(*batch, make_features("", 6, SCALE, window), memory)
        assert (memory != 7).any() == split


@pytest.mark.parametrize("heads", [4, 16], ids=["one by one", "packed"])
def test_a_query_of_nan_stays_nan_and_alone(heads):
    q, *others = paged_batch(decoding(3000, 3000, 3000), 16, heads, 1, 64, torch.bfloat16)
    q[1] = torch.nan
    out = native.attention(q, *others, make_features("", heads, SCALE))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_a_key_that_is_not_a_number_reaches_the_result():
    q, cache, places, starts, lens, table = paged_batch(decoding(3000), 16, 4, 1, 64, torch.bfloat16)
    for part, value in itertools.product((0, 1), (torch.nan, torch.inf)):
        spoiled = cache.clone()
        spoiled[table[places[0], 100], part, :, 3] = value
        out = native.attention(q, spoiled, places, starts, lens, table, make_features("", 4, SCALE))
        assert not out.isfinite().any()


def test_one_recording_serves_rows_of_any_length():
    backend, layer_features = NativeBackend([AttentionShape(6, 2, 64)]), make_features("all", 6, SCALE)
    q, cache, places, starts, lens, table = paged_batch(decoding(5000, 9000, 20), 16, 6, 2, 64, torch.bfloat16)
    lengths = torch.ones_like(lens)
    metadata = backend.build(StepInputs(places, len(q), starts, lengths, decode_only=True), table, 16)
    with Recording(len(q)) as recording:
        out = backend.attend(q, cache, metadata, layer_features)
    assert recording.nbytes == out.nbytes  # partial results are in memory that the backend has
    replay = recording.replayed()
    for chosen in (lens, [1, 2, 20], [4999, 2500, 1], [2048, 1, 5]):
        lengths.copy_(torch.as_tensor(chosen))
        replay(len(q), len(q), 0)
        assert torch.equal(out, native.attention(q, cache, places, starts, lengths, table, layer_features))


@pytest.mark.parametrize("length", [1, 70, 600, WHOLE + 1])
def test_queries_of_one_kv_head_dealt_to_threads(set_threads, length):
    """As on one thread, to the bit; with heads of 256 as Gemma has them."""
    batch = paged_batch(decoding(length), 16, 4, 1, 256, torch.bfloat16)
    layer_features = make_features("", 4, SCALE)
    found = []
    for threads in (1, 2, 3, 4):
        set_threads(threads)
        found.append(native.attention(*batch, layer_features))
    check_close(found[0], paged_attention(*batch, layer_features))
    assert all(torch.equal(found[0], other) for other in found[1:])
