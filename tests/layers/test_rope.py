"""Rope tables against transformers' own functions."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.kernels.rope import apply_rope
from quire.layers.rope_scaling import ROPE_SCALINGS
from quire.layers.rotary import RopeParameters, RotaryEmbedding
from tests.models.references import LLAMA3_ROPE

HEAD_DIM, MAX_POSITIONS = 32, 128
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(16)],
    "long_factor": [1.0 + 0.4 * i for i in range(16)],
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear-partial": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-partial": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn": YARN,
    "yarn-partial": YARN | {"partial_rotary_factor": 0.5},
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-untruncated": YARN | {"truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6},
    "yarn-one-mscale": YARN | {"mscale": 1.3},
    "yarn-ratio-of-lengths": YARN | {"factor": None},
    "yarn-one-point-ramp": YARN | {"original_max_position_embeddings": 8, "beta_fast": 1.0},
    "llama3": LLAMA3_ROPE,
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"factor": 8.0},
    "longrope-attention-factor": LONGROPE | {"attention_factor": 1.25},
    "longrope-not-longer": LONGROPE | {"original_max_position_embeddings": 128},
}


def config_with(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 5000.0} | rope,
    )


def table(hf: dict[str, Any], head_dim: int = HEAD_DIM, max_model_len: int | None = None) -> torch.Tensor:
    rope = RopeParameters.from_hf(hf, head_dim)
    rope = rope if max_model_len is None else rope.limited_to(max_model_len)
    return RotaryEmbedding(rope, torch.float32, torch.device("cpu")).cache


def reference(config: LlamaConfig, positions: int, seq_len: int | None = None) -> torch.Tensor:
    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=seq_len)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_those_of_transformers(name):
    config = config_with(SCALINGS[name])
    ours = table(config.to_dict())
    expected = reference(config, MAX_POSITIONS, MAX_POSITIONS)
    assert ours.shape[1] == expected.shape[1] and len(ours) >= MAX_POSITIONS
    torch.testing.assert_close(ours[:MAX_POSITIONS], expected, atol=1e-5, rtol=1e-5)


def test_every_type_is_compared():
    assert {rope["rope_type"] for rope in SCALINGS.values()} | {"default"} == set(ROPE_SCALINGS)


def test_dynamic_position_has_the_frequencies_of_a_sequence_that_ends_with_it():
    config = config_with(SCALINGS["dynamic"])
    ours = table(config.to_dict())
    assert len(ours) == 2 * MAX_POSITIONS
    for length in (MAX_POSITIONS - 5, MAX_POSITIONS, MAX_POSITIONS + 1, 2 * MAX_POSITIONS):
        expected = reference(config, length, length)[-1]
        torch.testing.assert_close(ours[length - 1], expected, atol=1e-5, rtol=1e-5)


def test_longrope_is_short_where_no_sequence_may_be_long():
    config = config_with(LONGROPE)
    short = table(config.to_dict(), max_model_len=32)
    torch.testing.assert_close(short[:32], reference(config, 32, 32), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(short, table(config.to_dict(), max_model_len=33))


def test_original_length_beside_the_rope_parameters_wins():
    hf = config_with(LONGROPE).to_dict() | {"original_max_position_embeddings": MAX_POSITIONS}
    longrope = RopeParameters.from_hf(hf, HEAD_DIM).scaling
    assert longrope.attention_factor == 1.0 and longrope.factors == tuple(LONGROPE["short_factor"])


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "axial"}, "'axial' is not supported; supported: default, linear, dynamic, yarn, llama3, long"),
        ({"rope_type": "linear"}, "'linear' need a number factor"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1}, "'llama3' need a number high_freq_factor"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, "need a list long_factor"),
        (LONGROPE | {"long_factor": [1.0] * 5}, "has 5 factors; 32 rotary dimensions need 16"),
    ],
)
def test_configs_that_make_no_rope(rope, message):
    with pytest.raises(ValueError, match=message):
        table({"rope_scaling": rope, "max_position_embeddings": MAX_POSITIONS})


def test_dimensions_beyond_the_rotary_part_are_unchanged():
    rope = RopeParameters.from_hf({"partial_rotary_factor": 0.25, "max_position_embeddings": 8}, HEAD_DIM)
    rotary = RotaryEmbedding(rope, torch.float32, torch.device("cpu"))
    x = torch.randn(5, 3, HEAD_DIM)
    out = apply_rope(x, *rotary(torch.tensor([0, 3, 7, 1, 2])).cos_sin)
    assert torch.equal(out[..., 8:], x[..., 8:]) and torch.equal(out[0], x[0])
    assert not torch.allclose(out[1:, :, :8], x[1:, :, :8])


def test_a_table_of_many_parts_equals_one_made_at_once(monkeypatch):
    hf = {"max_position_embeddings": 50}
    whole = table(hf)
    monkeypatch.setattr("quire.layers.rotary.TABLE_STEP", 7)
    assert torch.equal(table(hf), whole)
