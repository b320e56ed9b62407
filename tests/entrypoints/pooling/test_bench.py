"""`quire bench serve` on a server that pools."""

import json

import pytest

from quire.entrypoints.cli.main import main

FLAGS = ("--num-prompts", "10", "--random-input-len", "24", "--token-id-limit", "150")


@pytest.mark.parametrize("backend", ["openai-embeddings", "vllm-pooling"])
def test_every_text_is_counted(embedder, capsys, backend):
    command = ["bench", "serve", "--base-url", embedder.server.url, "--backend", backend, "--json", *FLAGS]
    for batch, requests in ((1, 10), (4, 3)):
        assert main([*command, "--random-batch-size", str(batch)]) == 0
        report = json.loads(capsys.readouterr().out)
        (run,) = report["details"]["runs"]
        assert (run["completed"], run["failed"], run["prompt_tokens"]) == (requests, 0, 10 * 24)
        assert report["metrics"]["e2el_p50"]["median"] > 0
        assert not any(name.startswith(("ttft", "itl")) for name in report["metrics"])


def test_refusals_are_counted(embedder, capsys):
    flags = ["--extra-body", '{"dimensions": 7}', "--no-warm-up", *FLAGS]
    assert main(["bench", "serve", "--base-url", embedder.server.url, "--endpoint", "/v1/embeddings", *flags]) == 2
    assert "every request failed: HTTP 400" in capsys.readouterr().err
