"""A command line of vLLM's users, unchanged, and the server that it starts."""

from pathlib import Path

import pytest

from tests.entrypoints.server_process import server_process

WORDS = (
    "--served-model-name big small --root-path /llm --dtype auto -tp 1 --pipeline_parallel_size=1 --runner generate "
    "--max-num-seqs 8 --max_num_batched_tokens 1k --gpu-memory-utilization 0.5 --swap-space 4 -O3 "
    "--enable-log-requests --compilation-config.mode 3 --disable-uvicorn-access-log --limit-mm-per-prompt.image 0 "
    "--no-enable-lora "
    '--disable-log-requests --trust-remote-code --allowed-origins ["*"] --enable-prefix-caching --stream-interval 2'
)


def test_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with server_process(tmp_path, *WORDS.split()) as server:
        assert server.url.endswith("/llm")
        for url in (server.url, server.url.removesuffix("/llm")):
            server.url = url
            assert server.get("/metrics").status_code == 200
            assert server.get("/v1/models").status_code == 401
            models = [model.id for model in server.client(api_key="secret").models.list()]
            assert models == ["big", "small"]
        for name in models:
            answer = server.client(api_key="secret").completions.create(model=name, prompt="One", max_tokens=3)
            assert answer.usage is not None and answer.usage.completion_tokens == 3
        log = server.log.read_text()
    assert log.count("environment variables without effect here: VLLM_USE_V2_MODEL_RUNNER") == 1
    for said in (
        "--swap-space is accepted: ",
        "--optimization-level is accepted: ",
        "compilation-config: mode is accepted",
    ):
        assert log.count(said) == 1
    assert log.count("received request cmpl-") == 2 and "secret" not in log
