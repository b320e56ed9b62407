"""Positions of three axes, as Qwen2-VL's: equal to transformers' text model with the same positions."""

import numpy as np
import pytest
import torch

from quire import LLM, Feature, SamplingParams
from quire.layers.rotary import RopeParameters, RotaryEmbedding
from quire.messages.features import prompt_positions
from tests.features.test_embeddings import FEW_BLOCKS, random_embeds
from tests.tiny_models import prompts, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = prompts((30, 50, 64, 90))
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
SETTINGS = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": FEW_BLOCKS,
    "depth 2, chunks, preempted": {"async_depth": 2, "max_num_batched_tokens": 13, **FEW_BLOCKS},
    "drafts": {"spec_method": "tests.spec_decode.proposers:Fixed", "spec_tokens": 2, "spec_adaptive": False},
}


QWEN2_VL = {"rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN3_VL = {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}


def grid(time, height, width):
    return np.indices((time, height, width)).reshape(3, -1)


def image(start, height, width, seed):
    length = height * width
    return Feature("embeds", start, length, random_embeds(length, seed), positions=grid(1, height, width))


def features_of(ids):
    """Two images with text between them, and embeddings placed as text is."""
    return [image(3, 2, 4, 1), image(15, 3, 3, 2), Feature("embeds", 26, 2, random_embeds(2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder, transformers' text model of Qwen2-VL, and the head."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    folder = tmp_path_factory.mktemp("model")
    made = save_tiny("qwen2", folder)
    fields = made.config.to_dict() | {"rope_parameters": ROPE, "attn_implementation": "eager"}
    text = Qwen2VLTextModel(Qwen2VLTextConfig(**fields)).float().eval()
    text.load_state_dict(made.model.state_dict())
    return str(folder), text, made.lm_head


def engine(model, rope=ROPE, **options):
    defaults = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, "enable_prompt_embeds": True}
    if "num_gpu_blocks_override" not in options:
        defaults["kv_cache_memory_bytes"] = 1 << 24
    return LLM(model[0], hf_overrides={"rope_parameters": rope}, **{**defaults, **options})


@torch.no_grad()
def reference(model, ids, features, count=GREEDY.max_tokens):
    """Without a cache: greedy tokens and their logprobs."""
    _, text, head = model
    embeds = text.embed_tokens(torch.tensor([ids]))
    for feature in features:
        embeds[0, feature.start : feature.stop] = torch.from_numpy(feature.data)
    positions = torch.from_numpy(prompt_positions(features, len(ids)))
    tokens, logprobs = [], []
    for _ in range(count):
        hidden = text(inputs_embeds=embeds, position_ids=positions[:, None], use_cache=False).last_hidden_state
        scores = head(hidden[0, -1]).log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores[tokens[-1]]))
        embeds = torch.cat((embeds, text.embed_tokens(torch.tensor([[tokens[-1]]]))), dim=1)
        positions = torch.cat((positions, positions.max().expand(3, 1) + 1), dim=1)
    return tokens, logprobs


def assert_equal(model, output, ids, features):
    tokens, logprobs = reference(model, ids, features)
    found = output.outputs[0]
    assert list(found.token_ids) == tokens
    chosen = [entry[token].logprob for entry, token in zip(found.logprobs, tokens, strict=True)]
    assert chosen == pytest.approx(logprobs, abs=1e-3)


def test_positions_of_a_prompt():
    """Text counts up; an image begins where the text before it ends, and the text after it behind its largest."""
    first, second = image(2, 2, 3, 0), image(9, 1, 2, 0)
    positions = prompt_positions([first, second], 12)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert (prompt_positions([], 4) == np.arange(4)).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_the_reference(model, setting):
    with engine(model, **SETTINGS[setting]) as llm:
        # Beside text, whose three positions are equal.
        made = [{"prompt_token_ids": ids, "features": features_of(ids)} for ids in PROMPTS]
        text = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate([*made, *text], GREEDY, use_tqdm=False)
        for output, ids in zip(outputs, PROMPTS, strict=False):
            assert_equal(model, output, ids, features_of(ids))
        for output, ids in zip(outputs[len(PROMPTS) :], PROMPTS, strict=True):
            assert_equal(model, output, ids, [])
        assert (llm.llm_engine.stats.num_preemptions > 0) == ("preempted" in setting)


def test_positions_are_part_of_the_content(model):
    ids = PROMPTS[-1]
    with engine(model) as llm:
        other = [image(3, 4, 2, 1), *features_of(ids)[1:]]  # the same embeddings, in another shape
        for features, cached in ((features_of(ids), 0), (other, 0), (features_of(ids), 80), (other, 80)):
            (output,) = llm.generate({"prompt_token_ids": ids, "features": features}, GREEDY, use_tqdm=False)
            assert_equal(model, output, ids, features)
            assert output.num_cached_tokens == cached


def test_a_row_s_next_request_has_positions_of_its_own(model):
    ids = PROMPTS[0]
    with engine(model, max_num_seqs=1) as llm:
        made = {"prompt_token_ids": ids, "features": features_of(ids)}
        outputs = llm.generate([made, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
        assert_equal(model, outputs[0], ids, features_of(ids))
        assert_equal(model, outputs[1], ids, [])


@pytest.mark.parametrize("rope", [QWEN2_VL, QWEN3_VL])
def test_which_axis_turns_which_pair(rope):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    positions = torch.randint(0, 100, (3, 12), generator=torch.Generator().manual_seed(0))
    parameters = RopeParameters.from_hf({"rope_parameters": rope | {"rope_theta": 100.0}}, head_dim=16)
    cos, sin = RotaryEmbedding(parameters, torch.float32, torch.device("cpu"))(positions).cos_sin
    if rope is QWEN3_VL:
        config = Qwen3VLTextConfig(head_dim=16, rope_parameters=rope | {"rope_theta": 100.0})
        wanted = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
        assert torch.allclose(cos[:, 0], wanted[0][0], atol=1e-6)
        assert torch.allclose(sin[:, 0, 8:], wanted[1][0][:, 8:], atol=1e-6)
    else:
        frequencies = 100.0 ** (-torch.arange(8) / 8)
        axes = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
        assert torch.allclose(cos[:, 0, :8], (positions[axes].T * frequencies).cos(), atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.zeros((2, 4), np.int64), r"must be \[3, 4\]"),
        (np.full((3, 4), -1), "from 0 on"),
        (np.zeros((3, 4)), "whole numbers"),
        (np.full((3, 4), 500), "the model has positions up to 511"),
        (np.full((3, 4), 2**63 - 1), "the model has positions up to 511"),  # one more is negative
    ],
)
def test_wrong_positions_are_refused(model, positions, message):
    with engine(model) as llm, pytest.raises(ValueError, match=message):
        feature = Feature("embeds", 0, 4, random_embeds(4), positions=positions)
        llm.generate({"prompt_token_ids": [1] * 8, "features": [feature]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("sections", [[2, 3], [2, 3, 4], "abc", [8, 0, -1], [2.0, 3, 3]])
def test_wrong_sections_are_refused(model, sections):
    with pytest.raises(ValueError, match="mrope_section"):
        engine(model, ROPE | {"mrope_section": sections})
