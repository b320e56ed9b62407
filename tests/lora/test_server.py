"""Adapters as models of a server: real processes, the official client."""

import itertools
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.config.server import ServerConfig
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError
from quire.messages.lora import LoRARequest
from tests.entrypoints.server_process import server_process
from tests.entrypoints.stub_server import stub_engine

PROMPT = "The capital of France is"
SHAPES = {"self_attn.q_proj": (576, 576), "self_attn.v_proj": (192, 576), "mlp.down_proj": (576, 1536)}


def random_adapter(folder, seed):
    """Of SmolLM2-135M."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(0, 30, 3):
        for module, (out, in_) in SHAPES.items():
            place = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(4, in_, generator=generator) * 0.08
            tensors[f"{place}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.08
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [random_adapter(folder / f"adapter-{i}", i) for i in range(3)]


@pytest.fixture(scope="module")
def expected(adapters):
    """The text without an adapter, then with each."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    loras = [None, *(LoRARequest(f"a{i}", 1 + i, str(path)) for i, path in enumerate(adapters))]
    with LLM(dtype="float32", max_model_len=512, enable_lora=True, max_loras=3) as llm:
        outputs = llm.generate([PROMPT] * 4, params, False, loras)
    texts = [output.outputs[0].text for output in outputs]
    assert len(set(texts)) == 4
    return texts


@pytest.fixture(scope="module")
def server(adapters, tmp_path_factory):
    flags = ["--dtype", "float32", "--served-model-name", "base", "--enable-admin", "--api-server-count", "2"]
    flags += ["--enable-lora", "--max-loras", "2", "--lora-modules", f"first={adapters[0]}"]
    flags += ["--lora-folder", str(adapters[0].parent), "--lora-allowed-paths", str(adapters[0].parent)]
    with server_process(tmp_path_factory.mktemp("server"), *flags) as one:
        yield one


def complete(server, model):
    made = server.client().completions.create(
        model=model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.model == model
    return made.choices[0].text


def streamed(server, model):
    """A request that runs."""
    stream = server.client().completions.create(
        model=model, prompt=PROMPT, max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return itertools.chain([next(iter(stream))], stream)


def test_adapters_are_models(server, adapters, expected):
    with ThreadPoolExecutor(8) as pool:
        names = ["base", "first", "adapter-1", "adapter-2"] * 3  # the last two are found in the folder
        assert list(pool.map(lambda name: complete(server, name), names)) == expected * 3
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["base"]["parent"] is None
    assert cards["first"]["parent"] == "base" and cards["first"]["root"] == str(adapters[0])
    assert server.get("/v1/models/first").json()["id"] == "first"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has base, first"):
        complete(server, "other")
    with pytest.raises(openai.NotFoundError):
        complete(server, "../adapters")
    (info,) = re.findall(r"quire:lora_requests_info{.*} (\S+)", server.get("/metrics").text)
    assert abs(float(info) - time.time()) < 3600, "the time of the wall clock"


def test_adapters_in_every_dialect(server):
    """Each answers as chat completions do with the same adapter."""
    told, client = {"role": "user", "content": PROMPT}, server.client()
    texts = []
    for name in ("base", "first", "adapter-1"):
        chat = client.chat.completions.create(model=name, messages=[told], max_tokens=8, temperature=0)
        response = client.responses.create(model=name, input=PROMPT, max_output_tokens=8, temperature=0)
        body = {"model": name, "messages": [told], "max_tokens": 8, "temperature": 0}
        message = server.post("/v1/messages", body).json()
        assert response.output_text == message["content"][0]["text"] == chat.choices[0].message.content
        assert response.model == message["model"] == name
        texts.append(response.output_text)
    assert len(set(texts)) == 3
    assert server.get("/view/info").json()["models"][:2] == ["base", "first"]
    assert (
        "enum" not in server.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    )


def test_adapters_of_a_model_that_embeds(adapters, tmp_path):
    settings = {"convert": "embed", "pooler_config": {"pooling_type": "MEAN", "enable_chunked_processing": True}}
    long = "one two three " * 60
    with LLM(dtype="float32", max_model_len=64, enable_lora=True, **settings) as llm:
        loras = [None, LoRARequest("first", 1, str(adapters[0]))]
        expected = [llm.embed([PROMPT, long], use_tqdm=False, lora_request=one) for one in loras]
    flags = ["--dtype", "float32", "--served-model-name", "base", "--max-model-len", "64", "--convert", "embed"]
    flags += ["--pooler-config", json.dumps(settings["pooler_config"])]
    with server_process(tmp_path, *flags, "--enable-lora", "--lora-modules", f"first={adapters[0]}") as server:
        for name, outputs in zip(("base", "first"), expected, strict=True):
            made = server.client().embeddings.create(model=name, input=[PROMPT, long])
            assert made.model == name
            for one, output in zip(made.data, outputs, strict=True):
                assert one.embedding == pytest.approx(output.outputs.embedding, abs=1e-4)
    for one, other in zip(*expected, strict=True):
        assert one.outputs.embedding != pytest.approx(other.outputs.embedding, abs=1e-3)


def test_names_of_adapters_count_where_others_are_not_checked(tmp_path):
    engine = stub_engine()
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "adapter_config.json").write_text("{}")
    engine.config.lora.enable_lora = True
    config = ServerConfig(lora_folder=str(tmp_path), skip_model_name_validation=True, served_model_name=("base",))
    context = ServerContext(engine, config, engine.config)
    assert [context.check_model(name) for name in (None, "", "base", "gpt", "tuned")] == ["base"] * 4 + ["tuned"]
    assert context.adapter("tuned").lora_name == "tuned" and context.adapter("base") is None
    assert context.check_model("é" * 200) == "base", "more bytes than a file's name may have"
    context.config.skip_model_name_validation = False
    (tmp_path / "tuned" / "adapter_config.json").unlink()
    context.adapters.forget("tuned")
    with pytest.raises(ApiError, match="does not exist"):
        context.adapter("tuned")  # unloaded while the request was read: the base model must not answer it


def test_places_that_are_not_allowed(tmp_path):
    """Nor are links to these."""
    engine, allowed, other = stub_engine(), tmp_path / "allowed", random_adapter(tmp_path / "other", 1)
    config = ServerConfig(lora_allowed_paths=(str(allowed),), served_model_name=("base",))
    adapters = ServerContext(engine, config, engine.config).adapters
    for folder in (allowed, allowed / "links", allowed / "one"):
        folder.mkdir()
    (allowed / "link").symlink_to(other)
    (allowed / "circle").symlink_to("circle")
    for file in other.iterdir():
        (allowed / "links" / file.name).symlink_to(file)
        shutil.copy(file, allowed / "one")
    adapters.check_path(str(allowed / "one"))
    for name in ("link", "links", "../other", "../nowhere"):
        with pytest.raises(ApiError, match="is outside of --lora-allowed-paths"):
            adapters.check_path(str(allowed / name))
    for name in ("circle", "x" * 300):
        with pytest.raises(ApiError, match="cannot be read"):
            adapters.check_path(str(allowed / name))


def test_a_name_that_the_base_has():
    engine = stub_engine()
    engine.config.lora.enable_lora = True
    for names, taken in ((("base", "other"), "other"), ((), engine.model_name)):
        config = ServerConfig(lora_modules=(f"{taken}=/a",), served_model_name=names)
        with pytest.raises(ValueError, match=f"'{taken}' is the name of the base model"):
            ServerContext(engine, config, engine.config)


def test_folders_of_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    engine, folder = stub_engine(), random_adapter(tmp_path / "tuned", 1)
    engine.config.lora.enable_lora = True
    config = ServerConfig(lora_allowed_paths=("~/",), lora_folder="~", served_model_name=("base",))
    adapters = ServerContext(engine, config, engine.config).adapters
    adapters.check_path("~/tuned")
    assert adapters.get("tuned").lora_path == str(folder)


def test_loading_and_unloading(server, adapters, expected):
    path = shutil.copytree(adapters[1], adapters[0].parent / "copy")
    load = {"lora_name": "second", "lora_path": str(path)}
    loaded = server.post("/v1/load_lora_adapter", load)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert [complete(server, "second") for _ in range(4)] == [expected[2]] * 4  # by each API process
    again = server.post("/v1/load_lora_adapter", load)
    assert again.status_code == 400 and "is loaded already" in again.json()["error"]["message"]
    os.truncate(path / "adapter_model.safetensors", 1000)
    refused = server.post("/v1/load_lora_adapter", load | {"load_inplace": True})
    assert refused.status_code == 400 and "is corrupt or truncated" in refused.json()["error"]["message"]
    assert complete(server, "second") == expected[2], "the one before is served on"
    running = streamed(server, "second")
    shutil.copy(adapters[2] / "adapter_model.safetensors", path)
    assert server.post("/v1/load_lora_adapter", load | {"load_inplace": True}).status_code == 200
    assert [complete(server, "second") for _ in range(4)] == [expected[3]] * 4
    assert "".join(part.choices[0].text for part in running).startswith(expected[2]), "it keeps what it began with"
    stream = streamed(server, "second")
    busy = server.post("/v1/unload_lora_adapter", {"lora_name": "second"})
    assert busy.status_code == 400 and "is in use by 1 requests" in busy.json()["error"]["message"]
    assert sum(1 for _ in stream) > 10
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(server, "second")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x", "lora_path": "/etc"}, "outside of --lora-allowed-paths"),
        ({"lora_name": "base", "lora_path": "{}"}, "is the name of the base model"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "a\nb", "lora_path": "{}"}, "lora_name is"),
        ({"lora_name": 3, "lora_path": "{}"}, "lora_name"),
    ],
)
def test_what_cannot_be_loaded(server, adapters, body, message):
    if "lora_path" in body:
        body = body | {"lora_path": body["lora_path"].format(adapters[0].parent)}
    refused = server.post("/v1/load_lora_adapter", body)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]


def test_a_folder_that_does_not_exist(server, adapters):
    missing = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": f"{adapters[0].parent}/nowhere"})
    assert missing.status_code == 404 and "there is no folder" in missing.json()["error"]["message"]


def test_the_routes_need_a_flag(tmp_path):
    with server_process(tmp_path, "--enable-lora") as server:
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})
        assert refused.status_code == 404 and "--allow-runtime-lora-updating" in refused.json()["error"]["message"]
