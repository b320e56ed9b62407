"""Every encoder family: vectors and logits equal transformers', however texts are batched."""

import os

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.models.base import TOKEN_TYPE_SHIFT, SupportsPooling
from tests.encoders.tiny_encoders import FAMILIES, edit_config, make_reference, save_tiny_encoder

# Those whose heads and masked language models are tried in every run; the others by `make test-encoders`.
CORE = FAMILIES if os.environ.get("QUIRE_ALL_MODELS") else ("bert", "distilbert", "modernbert-mean")
POOLED = {"CLS": lambda h: h[0], "MEAN": lambda h: h.mean(0), "LAST": lambda h: h[-1]}
HEADS = [
    (family, task)
    for family in CORE
    for task in ("ForSequenceClassification", "ForTokenClassification")
    if (family, task) != ("eurobert", "ForSequenceClassification")
    and family not in ("embedding-gemma", "xlm-roberta", "gte-without-types")
]


def engine(path: str, **arguments) -> LLM:
    return LLM(
        path, **{"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8, "cpu_threads": 1, **arguments}
    )


def model_of(llm: LLM) -> SupportsPooling:
    model = llm.llm_engine.client.core.executor.worker.model
    assert isinstance(model, SupportsPooling)
    return model


def vectors(llm: LLM, prompts: list[list[int]], pooling_type: str) -> np.ndarray:
    params = PoolingParams(pooling_type=pooling_type, use_activation=False)
    return np.stack([output.outputs.data for output in llm.encode(prompts, params, use_tqdm=False)])


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors(tmp_path, family):
    reference = make_reference(family, tmp_path)
    with engine(reference.path) as llm:
        assert model_of(llm).is_pooling_model and model_of(llm).head_pooling is None
        for pooling_type, pool in POOLED.items():
            expected = torch.stack([pool(hidden) for hidden in reference.hidden]).numpy()
            assert np.abs(vectors(llm, reference.prompts, pooling_type) - expected).max() < 1e-4
        assert llm.llm_engine.client.core.state()["requests"] == 0


@pytest.mark.parametrize(("family", "task"), HEADS)
def test_heads(tmp_path, family, task):
    reference = make_reference(family, tmp_path, task)
    with engine(reference.path, convert="embed") as llm:
        model = model_of(llm)
        assert model.num_labels == 3
        if task == "ForTokenClassification":
            assert model.head_pooling == "ALL"
            logits = [model.classify(hidden) for hidden in reference.hidden]
        else:
            pooled = vectors(llm, reference.prompts, model.head_pooling)
            logits = list(model.classify(torch.from_numpy(pooled)))
    for ours, theirs in zip(logits, reference.logits, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("family", [family for family in CORE if family != "embedding-gemma"])
def test_checkpoints_of_masked_language_models_are_embedders(tmp_path, family):
    reference = make_reference(family, tmp_path, "ForMaskedLM")
    with engine(reference.path) as llm:
        expected = torch.stack([hidden[0] for hidden in reference.hidden]).numpy()
        assert np.abs(vectors(llm, reference.prompts, "CLS") - expected).max() < 1e-4


@pytest.mark.parametrize(
    "arguments",
    [{"max_num_batched_tokens": 40}, {"max_num_seqs": 1}, {"async_scheduling": False}, {"async_depth": 2}],
    ids=str,
)
def test_settings(tmp_path, arguments):
    reference = make_reference("modernbert", tmp_path)
    with engine(reference.path, **arguments) as llm:
        expected = torch.stack([hidden.mean(0) for hidden in reference.hidden]).numpy()
        assert np.abs(vectors(llm, reference.prompts, "MEAN") - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CORE)
def test_texts_that_threads_share_out_have_the_vectors_of_texts_alone(tmp_path, family, dtype):
    """Of many tokens each thread takes some texts; of few, and of one long text, threads share every product."""
    save_tiny_encoder(family, tmp_path)
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 60, 3, 17, 44, 2, 29, 60, 60, 5] * 4
    texts = [torch.randint(4, 211, (length,), generator=generator).tolist() for length in lengths]
    with engine(str(tmp_path), dtype=dtype, cpu_threads=2, max_num_seqs=64) as llm:
        together = vectors(llm, texts, "MEAN")
        alone = np.concatenate([vectors(llm, [text], "MEAN") for text in texts])
    assert (together == alone).all()


def test_bfloat16_is_close(tmp_path):
    reference = make_reference("bert", tmp_path)
    with engine(reference.path, dtype="bfloat16") as llm:
        found = vectors(llm, reference.prompts, "MEAN")
    for ours, hidden in zip(found, reference.hidden, strict=True):
        assert torch.cosine_similarity(torch.from_numpy(ours), hidden.mean(0), dim=0) > 0.999


def test_configs_that_are_not_supported_say_so(tmp_path):
    make_reference("bert", tmp_path)
    edit_config(tmp_path, position_embedding_type="relative_key")
    with pytest.raises(ValueError, match="position_embedding_type"):
        engine(str(tmp_path))


@pytest.mark.parametrize(
    "arguments", [{"runner": "generate"}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}]
)
def test_encoders_generate_no_text(tmp_path, arguments):
    save_tiny_encoder("bert", tmp_path)
    with pytest.raises(ValueError, match="BertModel gives vectors or classes, no text: serve it with runner pooling"):
        engine(str(tmp_path), **arguments)


def test_segments_of_a_pair():
    """Token ids hold them; what makes pairs of texts sets them."""
    from quire.models.encoder import TypedEmbedding

    embedding = TypedEmbedding(8, 2, 4, torch.float32, torch.device("cpu"))
    embedding.weight.data, embedding.types.data = torch.randn(8, 4), torch.randn(2, 4)
    ids = torch.tensor([3, 5 | 1 << TOKEN_TYPE_SHIFT])
    expected = embedding.weight[[3, 5]] + embedding.types[[0, 1]]
    assert torch.equal(embedding(ids), expected)
