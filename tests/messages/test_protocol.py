import msgspec
import numpy as np
import pytest

from quire.messages.features import Feature
from quire.messages.pooling_params import PoolingParams
from quire.messages.protocol import AddRequests, Call, Codec, FromEngine, Outputs, ToEngine, Unreadable
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, FinishReason, Logprobs, SchedulerStats
from quire.messages.sampling_params import RepetitionDetection, SamplingParams


def request(num_tokens, **params):
    return EngineCoreRequest(
        "a", 7, np.arange(num_tokens, dtype=np.int32), SamplingParams(**params), (2, 3), 2**62 + 1, 1.5, cache_salt="s"
    )


@pytest.mark.parametrize("num_tokens", [1, 100, 10_000])
def test_requests_survive_the_way(num_tokens):
    sent = request(
        num_tokens,
        n=2,
        stop=["x"],
        logit_bias={5: 1.5},
        seed=-3,
        max_tokens=None,
        repetition_detection=RepetitionDetection(max_pattern_size=4),
    )
    frames = Codec().encode(AddRequests([sent]))
    assert len(frames) == (2 if num_tokens * 4 >= 1024 else 1)
    (got,) = Codec(ToEngine).decode([bytes(f) for f in frames]).requests
    assert np.array_equal(got.prompt_token_ids, sent.prompt_token_ids) and got.prompt_token_ids.dtype == np.int32
    assert got.params == sent.params and got.seed == sent.seed and got.eos_token_ids == (2, 3)


def test_a_request_that_pools_is_told_apart_on_arrival():
    pooling = request(5)
    pooling.params = PoolingParams(pooling_type="MEAN", dimensions=8, use_activation=False)
    got = Codec(ToEngine).decode(Codec().encode(AddRequests([request(5), pooling]))).requests
    assert [one.params for one in got] == [SamplingParams(), pooling.params]
    assert got[0].pooling is None and got[1].pooling == pooling.params
    assert got[1].sampling.max_tokens == 1 and list(got[1].sequences()) == [got[1]]
    message = msgspec.msgpack.decode(Codec().encode(AddRequests([pooling]))[0])
    message["requests"][0]["params"]["dimensions"] = 0
    with pytest.raises(ValueError, match="dimensions is 0"):
        Codec(ToEngine).decode([msgspec.msgpack.encode(message)])


def test_features_travel_beside_the_message():
    sent = request(40)
    embeds = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    grid = np.arange(60).reshape(3, 20)
    sent.features = (Feature("embeds", 3, 20, embeds, b"\x00hash", grid), Feature("image", 30, 2, embeds[:2]))
    frames = Codec().encode(AddRequests([sent]))
    assert len(frames) == 2 and len(frames[0]) < 2000  # only the large array is a frame of its own
    (got,) = Codec(ToEngine).decode([bytes(f) for f in frames]).requests
    first, second = got.features
    assert (first.kind, first.start, first.stop, first.content_hash) == ("embeds", 3, 23, b"\x00hash")
    assert np.array_equal(first.data, embeds) and np.array_equal(first.positions, grid)
    assert np.array_equal(second.data, embeds[:2]) and second.positions is None


def test_a_request_for_many_completions_is_sent_once_and_shared():
    many, one = (request(100, n=n, prompt_logprobs=1, allowed_token_ids=list(range(1000))) for n in (128, 1))
    sizes = [len(Codec().encode(AddRequests([sent]))[0]) for sent in (many, one)]
    assert abs(sizes[0] - sizes[1]) < 10
    (got,) = Codec(ToEngine).decode(Codec().encode(AddRequests([many]))).requests
    first, *others = got.sequences()
    assert first is got and len(others) == 127
    assert [other.index for other in others] == list(range(8, 8 + 127))
    assert len({other.request_id for other in others}) == len({other.seed for other in others}) == 127
    assert {other.fork_of for other in others} == {"a"}
    assert first.params.prompt_logprobs == 1 and others[0].params.prompt_logprobs is None  # only one scores the prompt
    assert all(other.params is others[0].params for other in others)
    assert all(other.prompt_token_ids is first.prompt_token_ids for other in others)
    assert others[0].params.allowed_token_ids is first.params.allowed_token_ids


def test_requests_and_calls_of_an_undecodable_message_are_found():
    message = msgspec.msgpack.decode(Codec().encode(AddRequests([request(3, n=3)]))[0])
    message["requests"][0]["params"]["top_p"] = 2
    frames = [msgspec.msgpack.encode(message)]
    with pytest.raises(ValueError, match="top_p is 2"):
        Codec(ToEngine).decode(frames)
    assert Unreadable.of(frames, "why") == Unreadable("why", [7, 8, 9], [])
    call = [msgspec.msgpack.encode({"type": "Call", "number": 5, "name": 1})]
    assert Unreadable.of(call, "why") == Unreadable("why", [], [5])
    for frames in ([], [b""], [b"\xff"], [msgspec.msgpack.encode([1])], [msgspec.msgpack.encode({"type": "Call"})]):
        assert Unreadable.of(frames, "why") == Unreadable("why", [], [])


def test_outputs_survive_the_way():
    sent = EngineCoreOutputs(
        index=np.arange(300),
        token_ids=np.arange(300, dtype=np.int32),
        offsets=np.arange(301, dtype=np.int32),
        finish=np.zeros(300, np.int8),
        num_cached=np.zeros(300, np.int32),
        stop_reasons={3: 9},
        logprobs=Logprobs(np.array([1]), np.array([[4, 5]]), np.array([[-0.5, -1.5]], np.float32), np.array([1])),
    )
    frames = Codec().encode(Outputs(sent))
    got = Codec(FromEngine).decode(frames).outputs
    assert np.array_equal(got.token_ids, sent.token_ids) and got.stop_reasons == {3: 9}
    assert np.array_equal(got.logprobs.logprobs, sent.logprobs.logprobs)
    assert got.finish.dtype == np.int8 and FinishReason(int(got.finish[0])) == FinishReason.NONE


def test_a_front_end_s_part_of_the_outputs():
    all_of_them = EngineCoreOutputs(
        index=np.array([10, 21, 22, 11]),
        token_ids=np.arange(5, dtype=np.int32),
        offsets=np.array([0, 1, 2, 4, 5], np.int32),
        finish=np.zeros(4, np.int8),
        num_cached=np.zeros(4, np.int32),
        scheduled={2: 1.5, 3: 2.5},
        pooled={0: np.zeros(3, np.float32), 1: np.arange(1000, dtype=np.float32)},
        preempted=[21, 10, 21],
        stats=SchedulerStats(time=3.0, step_tokens=tuple(range(14))),
    )
    part = all_of_them.select(20, 30)
    assert part.index.tolist() == [21, 22] and part.token_ids.tolist() == [1, 2, 3]
    assert part.scheduled == {1: 1.5} and list(part.pooled) == [0]
    got = Codec(FromEngine).decode(Codec().encode(Outputs(part))).outputs
    assert got.scheduled == {1: 1.5} and got.stats == all_of_them.stats and got.preempted == [21, 21]
    assert np.array_equal(got.pooled[0], np.arange(1000)) and got.pooled[0].dtype == np.float32


def test_what_is_not_a_message_is_refused():
    codec = Codec(ToEngine)
    for frames in (
        [b""],
        [b"\xff\xff"],
        [msgspec.msgpack.encode({"type": "Dead", "cause": "no such message for an engine"})],
        [msgspec.msgpack.encode({"type": "Call", "number": "x", "name": 1})],
        [msgspec.msgpack.encode({"type": "AddRequests", "requests": [{"request_id": "a"}]})],
    ):
        with pytest.raises(ValueError, match="not a message"):
            codec.decode(frames)
    bad_array = msgspec.msgpack.encode(AddRequests([request(3)]), enc_hook=lambda a: ("O", [3], b"xxx"))
    with pytest.raises(ValueError, match="not a message"):
        codec.decode([bad_array])


def test_parameters_are_checked_on_arrival():
    message = msgspec.msgpack.decode(Codec().encode(AddRequests([request(3)]))[0])
    message["requests"][0]["params"]["top_p"] = 2
    with pytest.raises(ValueError, match="top_p is 2"):
        Codec(ToEngine).decode([msgspec.msgpack.encode(message)])


def test_calls():
    assert Codec(ToEngine).decode(Codec().encode(Call(3, "reset_prefix_cache"))) == Call(3, "reset_prefix_cache")
