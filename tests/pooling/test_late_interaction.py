"""Several results of one encoder: BGE-M3's dense, sparse and multi-vector ones, and ColBERT's."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quire import LLM
from tests.encoders.tiny_encoders import edit_config, save_tiny_encoder
from tests.pooling import models

TEXTS = [models.text(length) for length in (3, 9, 30)]


def engine(folder) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, max_num_seqs=8)


def hidden_states(model, tokenizer) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.base_model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0] for text in TEXTS]


def assert_equal(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == tuple(other.shape) and np.abs(one - other.detach().numpy()).max() < 1e-4


def max_sim(query: torch.Tensor, document: torch.Tensor) -> float:
    return float((query @ document.T).amax(dim=1).sum())


def test_bge_m3(tmp_path):
    model, tokenizer = save_tiny_encoder("xlm-roberta", tmp_path), models.add_tokenizer(tmp_path)
    models.add_modules(tmp_path, "cls_token")
    torch.manual_seed(3)
    colbert, sparse = nn.Linear(64, 64), nn.Linear(64, 1)
    torch.save(colbert.state_dict(), tmp_path / "colbert_linear.pt")
    torch.save(sparse.state_dict(), tmp_path / "sparse_linear.pt")
    hidden = hidden_states(model, tokenizer)
    with engine(tmp_path) as llm:
        dense = llm.embed(TEXTS, use_tqdm=False)
        vectors = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
        weights = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    expected = [F.normalize(h[0], dim=0) for h in hidden]
    assert_equal([np.asarray(one.outputs.embedding) for one in dense], expected)
    assert_equal([one.outputs.data for one in vectors], [F.normalize(colbert(h[1:]), dim=1) for h in hidden])
    assert_equal([one.outputs.data for one in weights], [torch.relu(sparse(h[1:-1])) for h in hidden])
    assert scores == pytest.approx([float(expected[0] @ one) for one in expected[1:]], abs=1e-4)


def test_colbert(tmp_path):
    model, tokenizer = save_tiny_encoder("bert", tmp_path, "ForMaskedLM"), models.add_tokenizer(tmp_path)
    torch.manual_seed(3)
    linear = nn.Linear(64, 16, bias=False)
    models.rename(tmp_path, lambda name: name if name.startswith("bert.") else None)
    models.add_tensors(tmp_path, **{"linear.weight": linear.weight.detach().clone()})
    edit_config(tmp_path, architectures=["HF_ColBERT"])
    vectors = [F.normalize(linear(h), dim=1).detach() for h in hidden_states(model, tokenizer)]
    with engine(tmp_path) as llm:
        assert_equal([one.outputs.data for one in llm.encode(TEXTS, use_tqdm=False)], vectors)
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    assert scores == pytest.approx([max_sim(vectors[0], one) for one in vectors[1:]], rel=1e-4)
