"""vLLM's flags of `quire bench serve`, each seen in what a real server receives and in the result files."""

import json
import ssl
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.bench import latency, serve, startup, throughput
from quire.bench.datasets import items
from quire.bench.serve_client import Target
from quire.bench.serve_workloads import RampUp, arrivals
from quire.bench.texts import LocalTexts
from quire.bench.vllm_flags import ACCEPTED, NOT_YET
from quire.config.flags import engine_kwargs
from quire.config.server import ServerConfig
from quire.entrypoints.cli.main import main
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

NAMES = json.loads((Path(__file__).parent / "vllm_bench_flags.json").read_text())
SMALL = ("--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "4", "--no-warm-up")
seen: list[tuple[str, dict[str, str], Any]] = []  # path, headers and body of every request


class Record:
    """Middleware of the server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def recording() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                    seen.append((scope["path"], headers, json.loads(b"".join(parts) or b"null")))
            return message

        await self.app(scope, recording, send)


class Profiler:
    """Middleware of a server that has a profiler."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].endswith("_profile"):
            await self.app(scope, receive, send)
            return
        seen.append((scope["path"], {}, scope["method"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    config = ServerConfig(middleware=("tests.bench.test_vllm_flags:Record",))
    with stub_server(stub_engine(), config) as one:
        yield one


def run(server: StubServer, *flags: str, code: int = 0) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Headers and bodies of the requests that generate."""
    seen.clear()
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == code
    return [(headers, body) for path, headers, body in seen if path.endswith("completions")]


def result(server: StubServer, folder: Path, *flags: str) -> dict[str, Any]:
    run(server, *SMALL, "--save-result", "--result-dir", str(folder), "--result-filename", "r.json", *flags)
    return json.loads((folder / "r.json").read_text())


@pytest.mark.parametrize("command", ["serve", "latency", "throughput", "startup"])
def test_no_flag_of_vllm_is_unknown(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = {"serve": serve, "latency": latency, "throughput": throughput, "startup": startup}[command]
    known = set(module.parser()._option_string_actions)
    assert [name for name in NAMES[command] if name not in known] == []
    for name in set(NAMES[command]) & NOT_YET.keys():
        if (command, name) in (("latency", "--use-beam-search"), ("serve", "--random-batch-size")):
            continue  # works there
        with pytest.raises(SystemExit):
            main(["bench", command, name, "some value"])
        assert f"{name} is not available yet" in capsys.readouterr().err


def test_neutral_values_and_what_is_already_so_are_accepted() -> None:
    words = [word for name, row in NOT_YET.items() if row.neutral for word in (name, row.neutral)]
    serve.parser().parse([*words, "--probe-request-rate", "0.0", "--disable-tqdm"])
    words = ["--prequeue-requests", "--lora-assignment", "random", "some-model", "--random-batch-size", "1"]
    args = throughput.parser().parse([*words, "--served-model-name", "a", "--device-memory-utilization", "0.5"])
    assert engine_kwargs(args) == {"model": "some-model", "gpu_memory_utilization": 0.5}
    assert set(ACCEPTED) == {"--disable-tqdm", "--prequeue-requests"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset-name", "hf"], "'hf' is not available yet: datasets of the Hugging Face hub"),
        (["--dataset-name", "nope"], "'nope' is unknown; allowed: random, prefix_repetition, sharegpt"),
        (["--backend", "vllm-rerank"], "not available yet: reranking"),
        (["--backend", "openai-embeddings", "--endpoint", "/v1/completions"], "sends to /v1/embeddings, not to"),
        (["--random-batch-size", "2"], "is for requests that pool; --backend openai sends one prompt each"),
        (["--backend", "openai", "--endpoint", "/v1/chat/completions"], "sends to /v1/completions, not to"),
        (["--dataset-name", "sonnet"], "needs a file (--dataset-path)"),
        (["--dataset-name", "custom", "--dataset-path", "/no/file"], "'/no/file' is not a file"),
        (["--dataset-path", "x"], "--dataset-name random reads no file"),
        (["--header", "a"], "write KEY=VALUE"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--random-range-ratio", '{"input": 0.5}'], 'write {"input": X, "output": X}'),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-start-rps", "2"], "need --ramp-up-strategy"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "2", "--ramp-up-end-rps", "1"],
            "--ramp-up-start-rps 2 is above --ramp-up-end-rps 1",
        ),
        (["--profile", *SMALL], "/start_profile returns status 404; start the server with --profiler-config"),
    ],
)
def test_mistakes_are_explained(
    server: StubServer, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "serve", "--base-url", server.url, *flags])
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    assert code == 2 and message in capsys.readouterr().err


def test_backends_and_endpoints(server: StubServer) -> None:
    port = server.url.rpartition(":")[2]
    for backend, path in (("vllm", "/v1/completions"), ("openai", "/v1/completions"), ("openai-chat", "/v1/chat/")):
        seen.clear()
        assert main(["bench", "serve", "--backend", backend, "--host", "127.0.0.1", "--port", port, *SMALL]) == 0
        assert all(one.startswith(path) for one, _, _ in seen if one.endswith("completions"))
        assert len(seen) >= 3
    (_, body) = run(server, *SMALL, "--endpoint", "/v1/chat/completions")[0]
    assert body["messages"] and body["max_completion_tokens"] == 4


def test_sampling_parameters_are_sent_if_given(server: StubServer) -> None:
    sent = ("temperature", "top_p", "top_k", "min_p", "logprobs", "ignore_eos", "min_tokens")
    for _, body in run(server, *SMALL):
        assert {name for name in sent if name in body} == {"ignore_eos"}  # random prompts run to their length
    flags = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--frequency-penalty", "0.2"]
    flags += ["--presence-penalty", "0.3", "--repetition-penalty", "1.1", "--logprobs", "2"]
    flags += ["--extra-body", '{"min_tokens": 2, "top_k": 7}']
    for _, body in run(server, *SMALL, *flags):
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.5, 0.9, 7, 0.1)
        assert (body["frequency_penalty"], body["presence_penalty"], body["repetition_penalty"]) == (0.2, 0.3, 1.1)
        assert (body["logprobs"], body["min_tokens"]) == (2, 2)
    chat = ["--backend", "openai-chat", "--logprobs", "3", "--chat-template-kwargs", '{"a": 1}']
    for _, body in run(server, *SMALL, *chat):
        assert (body["logprobs"], body["top_logprobs"], body["chat_template_kwargs"]) == (True, 3, {"a": 1})


def test_headers_ids_and_names(server: StubServer) -> None:
    flags = ["--header", "x-team=a=b", "Authorization=Bearer mine", "--request-id-prefix", "run7-"]
    sent = run(server, *SMALL, *flags, "--model", "org/base", "--served-model-name", MODEL)
    assert {headers["x-request-id"] for headers, _ in sent} == {"run7-0", "run7-1", "run7-2"}
    assert {(headers["x-team"], headers["authorization"]) for headers, _ in sent} == {("a=b", "Bearer mine")}
    assert {body["model"] for _, body in sent} == {MODEL}
    assert all(headers["x-request-id"].startswith("bench-") for headers, _ in run(server, *SMALL))


@pytest.mark.parametrize("way", ["random", "round-robin"])
def test_adapters_are_named_by_requests(server: StubServer, way: str) -> None:
    names = [MODEL, MODEL.upper()]  # the server has no adapters, but one more name
    flags = ["--num-prompts", "12", *SMALL[2:], "--lora-modules", *names, "--lora-assignment", way]
    found = [body["model"] for _, body in sorted(run(server, *flags, code=1), key=lambda sent: sent[0]["x-request-id"])]
    assert set(found) == set(names)
    if way == "round-robin":
        assert found.count(MODEL) == 6


def test_lengths(server: StubServer) -> None:
    def lengths(*flags: str) -> list[tuple[int, int]]:
        sent = run(server, "--num-prompts", "20", "--no-warm-up", *flags)
        return [(len(body["prompt"]), body["max_tokens"]) for _, body in sent]

    assert set(lengths("--input-len", "6", "--output-len", "3")) == {(6, 3)}
    assert set(lengths("--input-len", "6", "--output-len", "3", "--random-prefix-len", "4")) == {(10, 3)}
    ratio = lengths("--input-len", "20", "--output-len", "20", "--random-range-ratio", '{"input": 0.5, "output": 0.0}')
    assert len({own for own, _ in ratio}) > 1 and {out for _, out in ratio} == {20}
    both = lengths("--input-len", "20", "--output-len", "20", "--random-range-ratio", "0.5")
    assert all(10 <= own <= 30 and 10 <= out <= 30 for own, out in both) and len({out for _, out in both}) > 1
    first, same = (run(server, *SMALL, "--seed", "3") for _ in range(2))
    other = run(server, *SMALL, "--seed", "4")
    prompts = [sorted(body["prompt"] for _, body in one) for one in (first, same, other)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_tokenizer_bounds_random_tokens(server: StubServer, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    small = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w0"))
    small.save(str(tmp_path / "tokenizer.json"))
    sent = run(server, *SMALL, "--tokenizer", str(tmp_path))
    assert all(100 <= token < 120 for _, body in sent for token in body["prompt"])
    assert any(token >= 120 for _, body in run(server, *SMALL) for token in body["prompt"])


def test_warm_ups_and_the_check_before(server: StubServer) -> None:
    assert len(run(server, *SMALL)) == 3
    assert len(run(server, *SMALL, "--num-warmups", "5")) == 8
    assert len(run(server, *SMALL[:-1])) == 6  # a short request of each prompt
    assert len(run(server, *SMALL[:-1], "--num-warmups", "0")) == 3
    assert len(run(server, *SMALL, "--ready-check-timeout-sec", "30")) == 4


def test_a_server_that_does_not_come_up(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0.1", *SMALL]
    assert main(["bench", "serve", *flags]) == 2
    assert "no server responds" in capsys.readouterr().err
    assert main(["bench", "serve", *flags, "--model", "m"]) == 2
    assert "does not answer the first request: no connection" in capsys.readouterr().err


def test_the_servers_profiler_records_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    paths = ("tests.bench.test_vllm_flags:Profiler", "tests.bench.test_vllm_flags:Record")
    with stub_server(stub_engine(), ServerConfig(middleware=paths)) as server:
        run(server, *SMALL, "--profile", "--num-warmups", "1")
    measured = [(path, body) for path, _, body in seen if "models" not in path]
    assert measured[1] == ("/start_profile", "POST") and measured[-1] == ("/stop_profile", "POST")
    assert [path for path, _ in measured].count("/v1/completions") == 4


def test_certificates_are_verified_unless_told_otherwise() -> None:
    context = Target("https://host").address()[2]
    assert context is not None and context.verify_mode == ssl.CERT_REQUIRED
    context = Target("https://host", verify=False).address()[2]
    assert context is not None and context.verify_mode == ssl.CERT_NONE and not context.check_hostname


def test_ramp_up() -> None:
    for strategy in ("linear", "exponential"):
        times = arrivals(101, float("inf"), float("inf"), 0, RampUp(strategy, 1.0, 100.0))
        gaps = [b - a for a, b in pairwise([0.0, *times])]
        assert gaps[0] == pytest.approx(1.0) and gaps[-1] == pytest.approx(0.01) and gaps == sorted(gaps, reverse=True)
        assert gaps[50] == pytest.approx(1 / (50.5 if strategy == "linear" else 10.0))
    steady = arrivals(10, 5.0, float("inf"), 0)
    assert steady == pytest.approx([0.2 * (i + 1) for i in range(10)])


def test_ramp_up_of_a_run(server: StubServer, tmp_path: Path) -> None:
    flags = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "200"]
    found = result(server, tmp_path, *flags)
    assert (found["ramp_up_strategy"], found["ramp_up_start_rps"], found["ramp_up_end_rps"]) == ("linear", 50, 200)
    assert found["completed"] == 3


def sharegpt(folder: Path) -> Path:
    turns = [("Tell me a long story about ships", "one two three four five"), ("Hi", "too short a prompt to be taken")]
    turns += [("What is the capital of France?", "It is Paris, of course"), ("word " * 1200, "too long to be taken")]
    entries = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in turns]
    file = folder / "sharegpt.json"
    file.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}, {"id": "no conversation"}]))
    return file


def test_sharegpt(server: StubServer, tmp_path: Path) -> None:
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(sharegpt(tmp_path)), "--no-warm-up"]
    assert server.engine.tokenizer is not None
    answer = len(server.engine.tokenizer.encode("one two three four five"))
    sent = [body for _, body in run(server, *flags, "--num-prompts", "2", "--disable-shuffle")]
    wanted = {body["prompt"]: body["max_tokens"] for body in sent}
    assert list(sorted(wanted)) == ["Tell me a long story about ships", "What is the capital of France?"]
    assert wanted["Tell me a long story about ships"] == answer and "ignore_eos" not in sent[0]
    assert len(run(server, *flags, "--num-prompts", "5", "--no-oversample")) == 2
    sent = [body for _, body in run(server, *flags, "--num-prompts", "5", "--sharegpt-output-len", "3", "--ignore-eos")]
    assert len(sent) == 5 and {body["max_tokens"] for body in sent} == {3} and sent[0]["ignore_eos"]
    chats = run(server, *flags, "--num-prompts", "2", "--backend", "openai-chat")
    assert {body["messages"][0]["content"] for _, body in chats} == set(wanted)


def test_sonnet(server: StubServer, tmp_path: Path) -> None:
    file = tmp_path / "sonnet.txt"
    file.write_text("".join(f"line {i} of a poem that has so many lines\n" for i in range(50)))
    flags = ["--dataset-name", "sonnet", "--dataset-path", str(file), "--no-warm-up", "--num-prompts", "4"]
    sizes = ["--sonnet-input-len", "150", "--sonnet-prefix-len", "90", "--sonnet-output-len", "5"]
    prompts = [body["prompt"] for _, body in run(server, *flags, *sizes)]
    assert all(len(prompt) <= 150 for prompt in prompts) and len({tuple(prompt) for prompt in prompts}) == 4
    chats = [body for _, body in run(server, *flags, *sizes, "--backend", "openai-chat")]
    texts = [body["messages"][0]["content"] for body in chats]
    shared = "line 0 of a poem that has so many lines\nline 1 of a poem"
    assert all(shared in text for text in texts) and chats[0]["max_completion_tokens"] == 5
    assert not all(shared in text for text in _chat_texts(run(server, *flags, *sizes, "--sonnet-prefix-len", "0")))


def _chat_texts(sent: list[tuple[dict[str, str], dict[str, Any]]]) -> list[str]:
    engine = stub_engine()
    assert engine.tokenizer is not None
    return [engine.tokenizer.decode(body["prompt"]) for _, body in sent]


def test_custom(server: StubServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {i}", "output_tokens": 2 + i}) + "\n" for i in range(6)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--no-warm-up", "--num-prompts", "-1"]
    sent = [body for _, body in run(server, *flags, "--skip-chat-template")]
    assert {body["prompt"]: body["max_tokens"] for body in sent} == {f"prompt {i}": 2 + i for i in range(6)}
    assert {body["max_tokens"] for _, body in run(server, *flags, "--custom-output-len", "3")} == {3}
    assert {body["max_tokens"] for _, body in run(server, *flags, "--custom-output-len", "-1")} == set(range(2, 8))
    rendered = [body["prompt"] for _, body in run(server, *flags)]
    assert all(isinstance(prompt, list) for prompt in rendered)  # the chat template's tokens
    assert server.engine.tokenizer is not None
    assert "user" in server.engine.tokenizer.decode(rendered[0], skip_special_tokens=False)


def test_order_of_a_file(server: StubServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(30)))
    assert server.engine.tokenizer is not None
    texts = LocalTexts(server.engine.tokenizer)

    def order(*flags: str) -> list[Any]:
        words = ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template", "--no-oversample"]
        return [item.prompt for item in items(serve.parser().parse([*words, *flags]), 0, texts)]

    assert order("--disable-shuffle") == [f"prompt {i}" for i in range(30)] != order()
    assert sorted(order()) == sorted(order("--seed", "1")) and order() == order() != order("--seed", "1")


def test_a_result_file_has_vllms_keys(server: StubServer, tmp_path: Path) -> None:
    found = result(server, tmp_path, "--metadata", "version=1.2", "tp=1", "--label", "mine", "--goodput", "ttft:99999")
    assert (found["backend"], found["label"], found["model_id"], found["num_prompts"]) == ("openai", "mine", MODEL, 3)
    assert (found["version"], found["tp"], found["request_rate"], found["burstiness"]) == ("1.2", "1", "inf", 1.0)
    assert (found["completed"], found["failed"], found["max_concurrency"]) == (3, 0, None)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (3 * 8, 3 * 4)
    assert found["output_throughput"] == pytest.approx(12 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(36 / found["duration"])
    assert found["request_goodput"] == found["request_throughput"] == pytest.approx(3 / found["duration"])
    assert found["max_output_tokens_per_s"] == pytest.approx(12) and 1 <= found["max_concurrent_requests"] <= 3
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", f"p99_{name}_ms"} <= found.keys()
    assert "ttfts" not in found and "generated_texts" not in found
    few = result(server, tmp_path, "--percentile-metrics", "ttft", "--metric-percentiles", "25,99.9")
    assert (
        {"p25_ttft_ms", "p99.9_ttft_ms"} <= few.keys() and "mean_tpot_ms" not in few and few["request_goodput"] is None
    )


def test_details_of_every_request(server: StubServer, tmp_path: Path) -> None:
    found = result(server, tmp_path, "--save-detailed", "--client-processes", "2")
    assert found["input_lens"] == [8, 8, 8] and found["output_lens"] == [4, 4, 4] and found["errors"] == ["", "", ""]
    assert all(len(times) == 3 and min(times) >= 0 for times in found["itls"]) and min(found["ttfts"]) > 0
    assert all(text.split() for text in found["generated_texts"]) and len(found["start_times"]) == 3


def test_files_are_named_and_appended_to(server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(server, *SMALL, "--save-result", "--request-rate", "500", "--max-concurrency", "2", "--result-dir", "a/b")
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert file.name.startswith(f"openai-500.0qps-concurrency2-{MODEL}-") and file.suffix == ".json"
    for count in (1, 2):
        run(server, *SMALL, "--append-result", "--result-filename", "all.json")
        lines = (tmp_path / "all.json").read_text().splitlines()
        assert [json.loads(line)["completed"] for line in lines] == [3] * count
    run(server, *SMALL, "--save-result", "--result-filename", "all.json")
    assert len((tmp_path / "all.json").read_text().splitlines()) == 1
