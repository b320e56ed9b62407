"""Decoders that embed, classify and reward: the kind is found by itself, and results equal transformers'."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire import LLM, PoolingParams, SamplingParams
from quire.config import EngineConfig
from quire.engine.resolve_config import resolve_config
from tests.pooling import models
from tests.pooling.test_pooling import ARGUMENTS
from tests.tiny_models import prompts

PROMPTS = prompts((1, 5, 16, 40, 90))


def engine(folder, **arguments) -> LLM:
    return LLM(str(folder), **{**ARGUMENTS, "max_num_batched_tokens": 48, **arguments})


def hidden_states(model) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


def logits(model) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]


def assert_equal(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        data = np.asarray(one)
        assert data.shape == tuple(other.shape)
        assert np.abs(data - other.detach().numpy()).max(initial=0) < 1e-4


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Qwen2ForSequenceClassification",
                                  "Qwen3ForSequenceClassification", "GPT2ForSequenceClassification"])  # fmt: skip
def test_classes(tmp_path, name):
    model = models.save(
        name,
        tmp_path,
        num_key_value_heads=4,
        n_inner=96,
        id2label=models.LABELS,
        label2id={v: k for k, v in models.LABELS.items()},
    )
    with engine(tmp_path) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        assert [output.outputs.num_classes for output in found] == [3] * len(PROMPTS)
        expected = logits(model)
        assert_equal([output.outputs.probs for output in found], [row.softmax(dim=-1) for row in expected])
        raw = llm.classify(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        assert_equal([output.outputs.probs for output in raw], expected)
        with pytest.raises(ValueError, match="task is 'embed', which this model does not have; it has: classify"):
            llm.embed(PROMPTS)
        with pytest.raises(ValueError, match="this model pools and does not generate; it can: classify"):
            llm.generate(PROMPTS, SamplingParams())
        with pytest.raises(ValueError, match="does not score pairs: it can classify, token_classify with 3 classes"):
            llm.score("a", "b")


def test_a_class_for_each_token(tmp_path):
    model = models.save("Qwen3ForTokenClassification", tmp_path, num_labels=3)
    with engine(tmp_path) as llm:
        found = llm.encode(PROMPTS, use_tqdm=False)
    assert_equal([output.outputs.data for output in found], [row.softmax(dim=-1) for row in logits(model)])


def test_one_class_is_a_score(tmp_path):
    model = models.save("Qwen3ForSequenceClassification", tmp_path, num_labels=1)
    with engine(tmp_path) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        rewards = llm.reward(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        each = llm.reward(PROMPTS, pooling_params=PoolingParams(task="token_classify"), use_tqdm=False)
    assert [len(output.outputs.data) for output in each] == [len(ids) for ids in PROMPTS]
    assert_equal([output.outputs.probs for output in found], [row.sigmoid() for row in logits(model)])
    assert_equal([output.outputs.data for output in rewards], logits(model))


def test_a_number_of_classes_that_no_model_has(tmp_path):
    models.save("Qwen3ForSequenceClassification", tmp_path)
    with pytest.raises(ValueError, match="num_labels 1000000000000; it must be a whole number from 1 to 1048576"):
        engine(tmp_path, hf_overrides={"num_labels": 10**12})


@pytest.mark.parametrize(
    ("problem", "activation"), [("regression", lambda x: x), ("multi_label_classification", torch.sigmoid)]
)
def test_the_activation_is_the_model_s(tmp_path, problem, activation):
    model = models.save("LlamaForSequenceClassification", tmp_path, num_labels=3, problem_type=problem)
    with engine(tmp_path) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
    assert_equal([output.outputs.probs for output in found], [activation(row) for row in logits(model)])


def test_a_base_model_embeds(tmp_path):
    """As e5-mistral: MistralModel, whose tensors have no prefix, and no head."""
    model = models.save("MistralModel", tmp_path, sliding_window=24)
    with engine(tmp_path) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        every = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(ValueError, match="dimensions is 16, but the model does not support Matryoshka"):
            llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=16))
    hidden = hidden_states(model)
    assert_equal([output.outputs.embedding for output in found], [F.normalize(h[-1], dim=0) for h in hidden])
    assert_equal([output.outputs.data for output in every], [F.normalize(h, dim=1) for h in hidden])


def test_sentence_transformers_modules(tmp_path):
    """As Qwen3-Embedding: a causal model with modules.json embeds without any option."""
    model = models.save("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=True)
    dense = models.add_modules(tmp_path, "mean_tokens", dense=24)
    models.rename(tmp_path, lambda name: name.removeprefix("model."))
    with engine(tmp_path, hf_overrides={"matryoshka_dimensions": [8, 16]}) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        short = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        with pytest.raises(ValueError, match="dimensions is 12; the model's Matryoshka dimensions are 8, 16"):
            llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=12))
    vectors = [torch.tanh(dense(h.mean(dim=0))) for h in hidden_states(model)]
    assert_equal([output.outputs.embedding for output in found], [F.normalize(v, dim=0) for v in vectors])
    assert_equal([output.outputs.embedding for output in short], [F.normalize(v[:8], dim=0) for v in vectors])


def test_without_a_normalize_module_vectors_keep_their_length(tmp_path):
    model = models.save("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=True)
    models.add_modules(tmp_path, "lasttoken", normalize=False)
    with engine(tmp_path) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
    assert_equal([output.outputs.embedding for output in found], [h[-1] for h in hidden_states(model)])


@pytest.mark.parametrize("two_way", [True, False])
def test_tokens_as_classes(tmp_path, two_way):
    """As Qwen3-Reranker: what the model would say, yes or no."""
    model = models.save("Qwen3ForCausalLM", tmp_path)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [7, 9]}
    overrides |= {"is_original_qwen3_reranker": True} if two_way else {}
    with engine(tmp_path, hf_overrides=overrides) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
    said = [row[-1, [7, 9]].softmax(dim=-1) for row in logits(model)]
    assert_equal([output.outputs.probs for output in found], [row[1:] if two_way else row for row in said])


def reward_checkpoint(folder, name: str, outputs: int):
    model = models.save("Qwen2ForCausalLM", folder)
    torch.manual_seed(7)
    first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, outputs)
    stored = {
        "score.0.weight": first.weight,
        "score.0.bias": first.bias,
        "score.2.weight": last.weight,
        "score.2.bias": last.bias,
    }
    models.add_tensors(folder, **{key: value.detach().clone() for key, value in stored.items()})
    models.rename(folder, lambda key: None if key == "lm_head.weight" else key)
    models.configure(folder, architectures=[name])
    return [last(torch.relu(first(hidden))) for hidden in hidden_states(model)]


def test_rewards(tmp_path):
    expected = reward_checkpoint(tmp_path, "Qwen2ForRewardModel", 1)
    with engine(tmp_path) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    assert_equal([output.outputs.data for output in found], expected)


def test_rewards_of_steps(tmp_path):
    expected = reward_checkpoint(tmp_path, "Qwen2ForProcessRewardModel", 2)
    tag = PROMPTS[-1][3]
    with engine(tmp_path, pooler_config={"step_tag_id": tag}) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    steps = [row[torch.tensor(ids) == tag].softmax(dim=-1) for row, ids in zip(expected, PROMPTS, strict=True)]
    assert len(steps[-1]) >= 1 and sum(map(len, steps)) < sum(map(len, PROMPTS))
    assert_equal([output.outputs.data for output in found], steps)


def test_columns_of_the_vocabulary_at_steps(tmp_path):
    """As math-shepherd: the probability of two tokens after each step."""
    model = models.save("MistralForCausalLM", tmp_path)
    tag = PROMPTS[-1][3]
    pooler = {"pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": [7, 9]}
    with engine(tmp_path, convert="reward", pooler_config=pooler) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    pairs = zip(logits(model), PROMPTS, strict=True)
    steps = [row[torch.tensor(ids) == tag][:, [7, 9]].softmax(dim=-1) for row, ids in pairs]
    assert_equal([output.outputs.data for output in found], steps)


def test_any_decoder_is_made_one_that_embeds(tmp_path):
    model = models.save("LlamaForCausalLM", tmp_path)
    pooler = {"pooling_type": "CLS", "use_activation": False}
    with engine(tmp_path, runner="pooling", override_pooler_config=pooler) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        assert llm.llm_engine.config.pooling.setup.task == "embed"
    assert_equal([output.outputs.embedding for output in found], [h[0] for h in hidden_states(model)])
    with engine(tmp_path) as llm:
        assert llm.llm_engine.config.pooling.setup is None


@pytest.mark.parametrize(
    ("task", "expected"), [("embed", "embed"), ("score", "embed"), ("reward", "token_classify"), ("generate", None)]
)
def test_a_task_of_older_releases(tmp_path, task, expected):
    models.save("LlamaForCausalLM", tmp_path)
    config, _ = resolve_config(EngineConfig.from_kwargs(model=str(tmp_path), task=task, skip_tokenizer_init=True))
    assert (config.pooling.setup and config.pooling.setup.task) == expected
    with pytest.raises(ValueError, match="task is 'draft'; allowed: auto, generate, embed"):
        EngineConfig.from_kwargs(model=str(tmp_path), task="draft")


def test_long_inputs_in_parts(tmp_path):
    model = models.save("MistralModel", tmp_path)
    pooler = {"enable_chunked_processing": True, "max_embed_len": 100}
    with engine(tmp_path, max_model_len=32, pooler_config=pooler) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False)
        with pytest.raises(ValueError, match="the prompt has 101 tokens; at most 100 are allowed"):
            llm.embed([[3] * 101])
    expected = []
    with torch.no_grad():
        for ids in PROMPTS:
            parts = [ids[first : first + 32] for first in range(0, len(ids), 32)]
            vectors = [F.normalize(model(torch.tensor([part])).last_hidden_state[0, -1], dim=0) for part in parts]
            weights = torch.tensor([len(part) / len(ids) for part in parts])
            expected.append(weights @ torch.stack(vectors))
    assert_equal([output.outputs.embedding for output in found], expected)
    assert [len(output.prompt_token_ids) for output in found] == [len(ids) for ids in PROMPTS]


def test_wrong_options_are_refused(tmp_path):
    models.save("LlamaForCausalLM", tmp_path)
    for options, message in (
        ({"convert": "classify"}, "LlamaForCausalLM has no head for classes; name the tokens"),
        ({"runner": "generate", "convert": "embed"}, "convert is 'embed', which is for runner 'pooling'"),
        ({"runner": "embed"}, "runner is 'embed'; allowed: auto, generate, pooling"),
        ({"runner": "pooling", "pooler_config": {"pooling": "MEAN"}}, "pooler_config has 'pooling'; allowed: task"),
        ({"runner": "pooling", "pooler_config": {"pooling_type": "BEST"}}, "pooling_type is 'BEST'; it must be one of"),
        ({"runner": "pooling", "pooler_config": {"task": "classify"}}, "task is 'classify'; the model can embed"),
        ({"runner": "pooling", "pooler_config": {"dimensions": "8"}}, "dimensions is '8'; it must be of type int"),
        ({"runner": "pooling", "pooler_config": {"dimensions": 8}}, "not trained for shorter embeddings"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            engine(tmp_path, **options)
