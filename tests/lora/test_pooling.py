"""Adapters of models that give vectors and classes, equal to peft's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire import LLM, PoolingParams
from quire.config.lora import LoRAConfig
from quire.config.server import ServerConfig
from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.pooling.inputs import split_long
from quire.messages.lora import LoRARequest
from tests.encoders.tiny_encoders import prompts, save_tiny_encoder
from tests.entrypoints.server_process import server_process
from tests.entrypoints.stub_server import stub_engine
from tests.pooling import models

peft = pytest.importorskip("peft")

LINEARS = {"bert": ["query", "key", "value", "dense"], "modernbert": ["Wqkv", "Wo", "Wi"]}


def adapted(model, folder, family, **options):
    torch.manual_seed(1)
    config = peft.LoraConfig(**({"r": 4, "target_modules": LINEARS[family], "init_lora_weights": False} | options))
    model = peft.get_peft_model(model, config)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("family", LINEARS)
def test_vectors(family, tmp_path):
    # The pooler's layer, which no vector passes, is no part of the model here.
    model = save_tiny_encoder(family, tmp_path / "base")
    given = {"target_modules": [*LINEARS[family], "tok_embeddings"]}
    if family == "bert":
        given = {"target_modules": r".*(word_embeddings|layer.*(query|key|value|dense))"}
    model = adapted(model, tmp_path / "adapter", family, **given)
    with torch.no_grad():
        wanted = [model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy() for ids in prompts()]
    lora = LoRARequest("a", 1, str(tmp_path / "adapter"))
    params = PoolingParams(pooling_type="MEAN", use_activation=False)
    with LLM(str(tmp_path / "base"), dtype="float32", skip_tokenizer_init=True, enable_lora=True) as llm:
        loras = [lora if i % 2 else None for i in range(len(wanted))]
        found = [one.outputs.data for one in llm.encode(prompts(), params, use_tqdm=False, lora_request=loras)]
    errors = [np.abs(one - other).max() for one, other in zip(found, wanted, strict=True)]
    assert max(errors[1::2]) < 1e-4 and min(errors[::2]) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_for_classes_takes_no_adapter(dtype, tmp_path):
    """It is in float32, and its rows are no tokens. An adapter that adds nothing changes nothing."""
    model = save_tiny_encoder("modernbert", tmp_path / "base", "ForSequenceClassification")
    models.add_tokenizer(tmp_path / "base")
    adapted(model, tmp_path / "adapter", "modernbert", init_lora_weights=True)
    loras = [LoRARequest("a", 1, str(tmp_path / "adapter")), None]
    with LLM(str(tmp_path / "base"), dtype=dtype, enable_lora=True, max_lora_rank=64) as llm:
        with_it, without = (llm.classify(prompts(), use_tqdm=False, lora_request=lora) for lora in loras)
        adapters = llm.llm_engine.client.core.executor.worker.adapters
        assert {layer.partition(".")[0] for layer, _ in adapters._targets} == {"layers", "embed_tokens"}
    assert [one.outputs.probs for one in with_it] == [one.outputs.probs for one in without]


def test_adapters_over_http(tmp_path):
    model = save_tiny_encoder("modernbert", tmp_path / "base")
    tokenizer = models.add_tokenizer(tmp_path / "base")
    models.add_modules(tmp_path / "base")
    model = adapted(model, tmp_path / "adapter", "modernbert")
    flags = ["--dtype", "float32", "--max-model-len", "128", "--enable-lora", "--lora-modules"]
    with server_process(tmp_path, str(tmp_path / "base"), *flags, f"a={tmp_path / 'adapter'}") as server:
        text = models.text(20)
        (found,) = server.client().embeddings.create(model="a", input=[text]).data
    with torch.no_grad():
        wanted = F.normalize(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0), dim=0)
    assert np.abs(np.asarray(found.embedding) - wanted.numpy()).max() < 1e-4


def test_parts_of_a_long_text_have_its_adapter():
    lora = LoRARequest("a", 1, "/a")
    setup = SimpleNamespace(chunked=True, task="embed", max_embed_len=None)
    parts, counts = split_long([ParsedPrompt(None, list(range(10)), "salt", lora=lora)], setup, None, 4)
    assert [(part.cache_salt, part.lora) for part in parts] == [("salt", lora)] * 3 and counts == [3]


def test_names_of_models():
    engine = stub_engine()
    config = engine.config.replace(lora=LoRAConfig(enable_lora=True))
    given = ServerConfig(served_model_name=("base", "alias"), lora_modules=("a=/a",), skip_model_name_validation=True)
    context = ServerContext(engine, given, config)
    assert [context.check_model(name) for name in (None, "", "a", "other")] == ["base", "base", "a", "base"]
    assert context.adapter("base") is None and context.adapter("a").lora_path == "/a"
    context.adapters.forget("a")  # between the check and the prompt
    with pytest.raises(ApiError, match="'a' does not exist; this server has base, alias"):
        context.adapter("a")
    with pytest.raises(ValueError, match="--lora-modules has a name twice"):
        ServerContext(engine, ServerConfig(lora_modules=("a=/a", "a=/b")), config)
