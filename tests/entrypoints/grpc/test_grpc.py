"""The gRPC service as a client sees it, beside HTTP, on an engine without a model."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.cli import serve
from tests.entrypoints.stub_server import MODEL, StubServer, make_certificate, stub_engine, stub_server

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("quire.entrypoints.grpc.engine_pb2")
pb_grpc = pytest.importorskip("quire.entrypoints.grpc.engine_pb2_grpc")
service = pytest.importorskip("quire.entrypoints.grpc.service")

PROTO = Path(str(pb.__file__)).with_name("engine.proto")
KEY = (("authorization", "Bearer key"),)


@contextmanager
def stub(server: StubServer) -> Iterator[Any]:
    assert server.server.grpc is not None
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        yield pb_grpc.QuireEngineStub(channel)


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(stub_engine(), ServerConfig(grpc_port=0, max_request_bytes=1 << 20)) as one:
        yield one


@pytest.fixture
def slow() -> Iterator[StubServer]:
    with stub_server(stub_engine(0.02), ServerConfig(grpc_port=0)) as one:
        yield one


def ask(text: str = "count", stream: bool = False, **params: Any) -> Any:
    params = {"max_tokens": 5, "temperature": 0} | params
    return pb.GenerateRequest(text=text, stream=stream, sampling_params=pb.SamplingParams(**params))


def whole(server: StubServer, request: Any, **kwargs: Any) -> Any:
    with stub(server) as engine:
        (message,) = list(engine.Generate(request, timeout=20, **kwargs))
        return message.complete


def refused(server: StubServer, request: Any, code: str, **kwargs: Any) -> str:
    with stub(server) as engine, pytest.raises(grpc.RpcError) as caught:
        list(engine.Generate(request, timeout=20, **kwargs))
    assert caught.value.code().name == code, caught.value
    return str(caught.value.details())


def test_text_equals_that_over_http(server: StubServer) -> None:
    found = whole(server, ask())
    body = {"prompt": "count", "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (found.text, found.finish_reason) == (choice["text"], choice["finish_reason"])
    assert list(found.token_ids) == choice["token_ids"] and found.completion_tokens == 5
    ids = pb.TokenIds(ids=choice["prompt_token_ids"])
    again = whole(server, pb.GenerateRequest(token_ids=ids, sampling_params=pb.SamplingParams(max_tokens=5)))
    assert again.text == found.text and again.prompt_tokens == len(ids.ids) == found.prompt_tokens


def test_a_stream_has_the_same_text(server: StubServer) -> None:
    with stub(server) as engine:
        *chunks, last = list(engine.Generate(ask(stream=True, logprobs=1), timeout=20))
    expected = whole(server, ask())
    assert "".join(message.chunk.text for message in chunks) == expected.text
    assert [id for message in chunks for id in message.chunk.token_ids] == list(expected.token_ids)
    assert last.complete.finish_reason == "length" and last.complete.completion_tokens == 5 and not last.complete.text
    assert all(message.chunk.logprobs for message in chunks if message.chunk.token_ids)


def test_choices_and_stops(server: StubServer) -> None:
    with stub(server) as engine:
        messages = list(engine.Generate(ask(n=2, temperature=1), timeout=20))
    found = messages[0].complete
    indexes = {message.complete.index for message in messages}
    assert indexes <= {0, 1} and len(messages) == 2
    stop = found.text.split()[2]
    stopped = whole(server, ask(stop=[stop]))
    assert (stopped.finish_reason, stopped.stop_text) == ("stop", stop) and stop not in stopped.text


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "text or token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "INVALID_ARGUMENT", "token_ids is empty"),
        (ask(temperature=-1), "INVALID_ARGUMENT", "temperature is -1"),
        (ask(n=1000, temperature=1), "INVALID_ARGUMENT", "at most 128"),
        (ask("hi " * 9000), "INVALID_ARGUMENT", "tokens; at most"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 9000)), "INVALID_ARGUMENT", "has 9000 tokens; at most"),
        (ask(json="{"), "INVALID_ARGUMENT", "json"),
        (pb.GenerateRequest(text="x", model="gpt"), "NOT_FOUND", "does not exist"),
        (pb.GenerateRequest(text="x", request_id="a b"), "INVALID_ARGUMENT", "request_id"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31])), "INVALID_ARGUMENT", ""),
        (ask("x" * (2 << 20)), "RESOURCE_EXHAUSTED", "larger"),
        (ask(stop=["x"] * 300_000), "INVALID_ARGUMENT", "stop has more than 262144 values"),
        (ask(choice=pb.Choices(texts=["x"] * 300_000)), "INVALID_ARGUMENT", "choice has more than"),
    ],
)
def test_mistakes_are_explained(server: StubServer, request_: Any, code: str, message: str) -> None:
    assert message in refused(server, request_, code)
    assert whole(server, ask()).text  # nothing else is disturbed


def test_cancelling_ends_the_request(slow: StubServer) -> None:
    with stub(slow) as engine:
        call = engine.Generate(ask(stream=True, max_tokens=5000), timeout=20)
        next(call)
        call.cancel()
        slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)
    assert len(slow.engine.aborted) == 1


def test_a_deadline_ends_the_request(slow: StubServer) -> None:
    with stub(slow) as engine, pytest.raises(grpc.RpcError) as caught:
        list(engine.Generate(ask(stream=True, max_tokens=5000), timeout=0.5))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)


def test_the_end_of_the_server_ends_calls() -> None:
    config = ServerConfig(grpc_port=0, shutdown_timeout=0.2)
    with stub_server(stub_engine(0.02), config) as server, stub(server) as engine:
        call = engine.Generate(ask(stream=True, max_tokens=5000), timeout=60)
        next(call)
        server.server.should_exit = True
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


def test_the_servers_own_deadline() -> None:
    with stub_server(stub_engine(0.02), ServerConfig(grpc_port=0, request_timeout=0.3)) as server:
        assert "0.3 seconds" in refused(server, ask(max_tokens=5000), "DEADLINE_EXCEEDED")
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)


def test_keys_and_rate_limits() -> None:
    config = ServerConfig(grpc_port=0, rate_limit_requests=3)
    with stub_server(stub_engine(), config, api_keys=("key", "other")) as server:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "wrong"),)):
            assert "key" in refused(server, ask(), "UNAUTHENTICATED", metadata=metadata)
        with stub(server) as engine:
            assert engine.HealthCheck(pb.HealthCheckRequest(), timeout=20).healthy  # without a key
            info = engine.GetModelInfo(pb.GetModelInfoRequest(), timeout=20, metadata=KEY)
            assert info.served_names == [MODEL] and info.max_model_len == server.engine.max_model_len
        for metadata in (KEY, (("x-api-key", "key"),)):
            assert whole(server, ask(), metadata=metadata).text
        assert "limit is 3" in refused(server, ask(), "RESOURCE_EXHAUSTED", metadata=KEY)
        over_http = server.post("/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer key"})
        assert over_http.status_code == 429  # they count together


def test_without_a_key_the_message_is_not_read() -> None:
    """The answer comes although the request never ends."""
    with stub_server(stub_engine(), ServerConfig(grpc_port=0), api_keys=("key",)) as server:
        assert server.server.grpc is not None
        never = threading.Event()

        def endless() -> Iterator[bytes]:
            never.wait(20)
            yield b""

        with grpc.insecure_channel(server.server.grpc.address) as channel:
            try:
                with pytest.raises(grpc.RpcError) as caught:
                    channel.stream_unary("/quire.grpc.engine.QuireEngine/Generate")(endless(), timeout=10)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                for name in ("quire.grpc.engine.QuireEngine/HealthCheck", "grpc.health.v1.Health/Check"):
                    assert channel.stream_unary(f"/{name}")(endless(), timeout=10) == b"\x08\x01"
            finally:
                never.set()


def test_messages_that_are_read_are_bounded_in_all() -> None:
    """A client that does not send its message has the only place until its time is over."""
    limits = ServerConfig(grpc_port=0, max_request_bytes=1 << 20, max_request_bytes_in_all=1 << 20)
    limits.timeout_request_body = 0.5
    with stub_server(stub_engine(), limits) as server:
        assert server.server.grpc is not None
        never, reading = threading.Event(), server.server.grpc.service._reading

        def endless() -> Iterator[bytes]:
            never.wait(20)
            yield b""

        with grpc.insecure_channel(server.server.grpc.address) as channel:
            stalled = channel.stream_stream("/quire.grpc.engine.QuireEngine/Generate")(endless(), timeout=20)
            server.wait_until(reading.locked)
            assert whole(server, ask()).text and stalled.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "--timeout-request-body" in stalled.details()
            never.set()


def test_what_is_no_request_is_refused(server: StubServer) -> None:
    assert server.server.grpc is not None
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        generate = channel.stream_stream("/quire.grpc.engine.QuireEngine/Generate")
        for messages, said in ((iter((b"\xff\xff",)), "engine.proto"), (iter(()), "no message")):
            with pytest.raises(grpc.RpcError) as caught:
                list(generate(messages, timeout=20))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and said in caught.value.details()


def test_tls(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    config = ServerConfig(grpc_port=0, ssl_keyfile=str(key), ssl_certfile=str(certificate))
    with stub_server(stub_engine(), config, api_keys=("key",)) as server:
        assert server.server.grpc is not None
        port = server.server.grpc.port
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            engine = pb_grpc.QuireEngineStub(channel)
            (message,) = list(engine.Generate(ask(), timeout=20, metadata=KEY))
            assert message.complete.completion_tokens == 5
        plain = grpc.insecure_channel(f"127.0.0.1:{port}")
        untrusting = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials())
        for channel in (plain, untrusting):
            with channel, pytest.raises(grpc.RpcError) as caught:
                list(pb_grpc.QuireEngineStub(channel).Generate(ask(), timeout=20, metadata=KEY))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_tls_with_certificates_of_clients(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    config = ServerConfig(grpc_port=0, ssl_keyfile=str(key), ssl_certfile=str(certificate))
    config.ssl_ca_certs, config.ssl_cert_reqs = str(certificate), 2
    with stub_server(stub_engine(), config) as server:
        assert server.server.grpc is not None
        address, root = f"127.0.0.1:{server.server.grpc.port}", certificate.read_bytes()
        known = grpc.ssl_channel_credentials(root, key.read_bytes(), root)
        with grpc.secure_channel(address, known) as channel:
            assert list(pb_grpc.QuireEngineStub(channel).Generate(ask(), timeout=20))
        with (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(root)) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            list(pb_grpc.QuireEngineStub(channel).Generate(ask(), timeout=20))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_the_queue_limit_is_that_of_http() -> None:
    with stub_server(stub_engine(0.02), ServerConfig(grpc_port=0, max_waiting_requests=0)) as server:
        server.engine.max_num_seqs = 1
        with stub(server) as engine:
            running = engine.Generate(ask(stream=True, max_tokens=5000), timeout=20)
            next(running)
            assert "waiting" in refused(server, ask(), "UNAVAILABLE")
            running.cancel()
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)


def test_the_standard_health_service(server: StubServer) -> None:
    assert server.server.grpc is not None
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=20) == b"\x08\x01"
        watched = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
        assert next(watched) == b"\x08\x01"
        server.in_loop(lambda: setattr(server.server.context, "draining", True))
        try:
            assert next(watched) == b"\x08\x02" == check(b"", timeout=20)
        finally:
            server.in_loop(lambda: setattr(server.server.context, "draining", False))
            watched.cancel()


def test_watchers_of_health_leave_room_for_calls(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_WATCHES", 1)
    assert server.server.grpc is not None
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watched = watch(b"", timeout=20)
        assert next(watched) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(b"", timeout=20))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE and "watching" in caught.value.details()
        watched.cancel()


def test_the_code_is_that_of_the_proto_file() -> None:
    """`python -m scripts.grpc_code` writes it."""
    text = re.sub(r"//.*", "", PROTO.read_text())
    for name, body in re.findall(r"^message (\w+) \{(?:\}|(.*?)^\})", text, re.MULTILINE | re.DOTALL):
        fields = {field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        found = {field.name: field.number for field in pb.DESCRIPTOR.message_types_by_name[name].fields}
        assert fields.items() <= found.items(), name
    methods = re.findall(r"rpc (\w+)\(", text)
    assert [method.name for method in pb.DESCRIPTOR.services_by_name["QuireEngine"].methods] == methods


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grpc-port", "0", "--api-server-count", "2"], "name it"),
        (["--grpc-port", "70000"], "grpc_port"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.run(serve.parser().parse_args(flags))
