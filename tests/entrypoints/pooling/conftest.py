"""Servers of tiny encoders, started as users start them, with transformers' models beside them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.encoders.tiny_encoders import edit_config, save_tiny_encoder
from tests.entrypoints.server_process import ServerProcess, server_process
from tests.pooling import models

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
PROMPTS = {"query": "w5 w6 ", "document": ""}


@dataclass
class PoolingServer:
    server: ServerProcess
    model: Any  # transformers'
    tokenizer: Any

    def embedding(self, text: str, normalize: bool = True, dimensions: int | None = None) -> torch.Tensor:
        with torch.no_grad():
            vector = self.model(**self.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
        return F.normalize(vector[:dimensions], dim=0) if normalize else vector

    def score(self, query: str, document: str) -> float:
        with torch.no_grad():
            return float(
                self.model(
                    **self.tokenizer(query, document, return_token_type_ids=True, return_tensors="pt")
                ).logits.sigmoid()
            )


@pytest.fixture(scope="package")
def embedder(tmp_path_factory) -> Iterator[PoolingServer]:
    folder = tmp_path_factory.mktemp("bert")
    model = save_tiny_encoder("bert", folder)
    tokenizer = models.add_tokenizer(folder, CHAT_TEMPLATE)
    models.add_modules(folder)
    edit_config(folder, matryoshka_dimensions=[16, 32])
    texts = {"prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(texts))
    with server_process(tmp_path_factory.mktemp("embedder"), str(folder), "--max-model-len", "128") as server:
        yield PoolingServer(server, model, tokenizer)


@pytest.fixture(scope="package")
def cross_encoder(tmp_path_factory) -> Iterator[PoolingServer]:
    import transformers

    from tests.encoders.tiny_encoders import COMMON

    folder = tmp_path_factory.mktemp("cross")
    torch.manual_seed(1)
    names = {"num_labels": 1, "id2label": {0: "fits"}, "label2id": {"fits": 0}}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**COMMON | names)).eval()
    model.save_pretrained(folder)
    tokenizer = models.add_tokenizer(folder)
    with server_process(tmp_path_factory.mktemp("reranker"), str(folder), "--max-model-len", "128") as server:
        yield PoolingServer(server, model, tokenizer)
