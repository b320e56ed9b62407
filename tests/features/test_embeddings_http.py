"""prompt_embeds of /v1/completions, through a real server."""

import io
from base64 import b64encode

import pytest
import torch

from tests.entrypoints.server_process import server_process
from tests.entrypoints.stub_server import stub_engine, stub_server
from tests.tiny_models import prompts, save_tiny

PROMPTS = prompts((5, 17))
COMMON = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


def encoded(tensor: torch.Tensor) -> str:
    written = io.BytesIO()
    torch.save(tensor, written)
    return b64encode(written.getvalue()).decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    table = save_tiny("llama", folder).get_input_embeddings().weight.detach()
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--kv-cache-memory-bytes", "16M", "--max-model-len", "128")
    with server_process(tmp_path_factory.mktemp("server"), str(folder), *flags, "--enable-prompt-embeds") as server:
        yield server, table


def test_embeddings_of_the_ids_give_the_tokens_of_the_ids(served):
    server, table = served
    wanted = server.post("/v1/completions", {"prompt": PROMPTS, **COMMON}).json()["choices"]
    first, second = (encoded(table[torch.tensor(ids)]) for ids in PROMPTS)
    both = server.post("/v1/completions", {"prompt_embeds": [first, second], **COMMON}).json()["choices"]
    assert [one["token_ids"] for one in both] == [one["token_ids"] for one in wanted]
    mixed = server.post("/v1/completions", {"prompt_embeds": second, "prompt": PROMPTS[0], **COMMON}).json()["choices"]
    assert [one["token_ids"] for one in mixed] == [wanted[1]["token_ids"], wanted[0]["token_ids"]]


def test_what_is_refused(served):
    server, table = served
    good = encoded(table[:4])
    wrong = {
        "prompt_embeds is not a dense tensor": {"prompt_embeds": "no base64"},
        "LongStorage": {"prompt_embeds": encoded(torch.arange(4))},
        "sparse": {"prompt_embeds": encoded(table[:4].to_sparse())},
        "hidden size": {"prompt_embeds": encoded(torch.zeros(4, 3))},
        "not compatible": {"prompt_embeds": good, "prompt_logprobs": 1},
        "echo is not compatible": {"prompt_embeds": good, "echo": True},
        "Either prompt or prompt_embeds must be provided and non-empty.": {"prompt_embeds": []},
    }
    for message, body in wrong.items():
        response = server.post("/v1/completions", body)
        assert response.status_code == 400 and message in response.json()["error"]["message"], response.text
    rendered = server.post("/v1/completions/render", {"prompt_embeds": good})
    assert rendered.status_code == 400


def test_a_server_without_the_flag():
    with stub_server(stub_engine()) as server:
        response = server.post("/v1/completions", {"prompt_embeds": encoded(torch.zeros(4, 3))})
    assert response.status_code == 400 and "--enable-prompt-embeds" in response.json()["error"]["message"]
