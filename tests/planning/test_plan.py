"""Legal sizes, memory and recommendations for known models."""

from typing import Any

import pytest

from quire.bench.workloads import MODEL_SHAPES
from quire.planning.gpus import GPUS, read_machine
from quire.planning.memory import Limits, rank_memory
from quire.planning.plan import Load, Plan, make_plan
from quire.planning.shape import read_shape
from quire.planning.simulate import workload_steps
from quire.planning.sizes import Layout, stage_ranges, tensor_obstacle
from quire.planning.weight_format import read_format
from tests.planning.configs import (
    AWQ,
    FP8_BLOCKS,
    GEMMA3_27B,
    GPT_OSS_20B,
    GPTQ,
    LLAMA3_8B,
    LLAMA3_70B,
    SMOLLM2,
    W4A16,
)

QWEN3_30B = MODEL_SHAPES["qwen3-30b-a3b"]


def plan(config: dict[str, Any], gpus: str, length: int = 8192, quantization: str | None = None, **options) -> Plan:
    shape = read_shape(config)
    weights = read_format(config, quantization, shape.dtype_bytes)
    return make_plan("model", shape, weights, read_machine(gpus), Limits(length), Load(), **options)


def legal(config: dict[str, Any], most: int = 16) -> list[int]:
    shape = read_shape(config)
    weights = read_format(config, None, 2)
    return [n for n in range(1, most + 1) if tensor_obstacle(shape, weights, n) is None]


@pytest.mark.parametrize(
    ("config", "billions"),
    [(SMOLLM2, 0.1345), (LLAMA3_8B, 8.03), (LLAMA3_70B, 70.55), (QWEN3_30B, 30.53), (GPT_OSS_20B, 20.9)],
)
def test_parameters(config: dict[str, Any], billions: float) -> None:
    assert read_shape(config).parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (SMOLLM2, [1, 3]),
        (LLAMA3_8B, [1, 2, 4, 8, 16]),  # 16: KV heads repeated
        (QWEN3_30B, [1, 2, 4, 8, 16]),
        (LLAMA3_8B | {"quantization_config": GPTQ}, [1, 2, 4, 8, 16]),
        (QWEN3_30B | {"quantization_config": FP8_BLOCKS}, [1, 2]),  # experts of 768: 384, then no whole blocks
        (GPT_OSS_20B, [1, 2]),  # experts of 2,880: 1,440 is 45 groups of 32, 720 no whole number
        (GEMMA3_27B, [1, 2, 4, 8, 16]),
    ],
)
def test_tensor_parallel_sizes(config: dict[str, Any], sizes: list[int]) -> None:
    assert legal(config) == sizes


def test_obstacles_are_named() -> None:
    found = plan(SMOLLM2, "4xL4")
    assert found.tensor_sizes == (1, 3)
    assert found.obstacles == {
        2: "9 attention heads cannot be divided by 2",
        4: "9 attention heads cannot be divided by 4",
    }


@pytest.mark.parametrize(
    ("stored", "bits", "fp8"),
    [(GPTQ, 4.16, False), (AWQ, 4.16, False), (W4A16, 4.125, False), (FP8_BLOCKS, 8, True)],
)
def test_stored_formats(stored: dict[str, Any], bits: float, fp8: bool) -> None:
    found = read_format({"quantization_config": stored}, None, 2)
    assert found.bits == pytest.approx(bits, abs=0.01) and found.fp8_compute is fp8


def test_quantized_weights_of_a_rank() -> None:
    dense, awq = plan(LLAMA3_8B, "H100"), plan(LLAMA3_8B | {"quantization_config": AWQ}, "H100")
    assert dense.chosen and awq.chosen
    assert dense.chosen.memory.weights == pytest.approx(16.06e9, rel=0.01)
    assert awq.chosen.memory.weights == pytest.approx(5.73e9, rel=0.01)  # embeddings and head in 16 bits


def test_mxfp4_quantizes_experts_only() -> None:
    found = plan(GPT_OSS_20B, "H100")
    assert found.chosen and found.chosen.memory.weights == pytest.approx(13.8e9, rel=0.01)  # the checkpoint's size


def test_70b_on_eight_gpus() -> None:
    found = plan(LLAMA3_70B, "8xH100")
    by_layout = {each.layout: each for each in found.candidates}
    assert not by_layout[Layout(1)].memory.fits and by_layout[Layout(8)].memory.fits
    assert by_layout[Layout(8)].memory.weights == pytest.approx(141.1e9 / 8, rel=0.01)
    # 80 layers, one of 8 KV heads, keys and values of 128 numbers of 2 bytes
    assert by_layout[Layout(8)].memory.bytes_per_token == {"full": 80 * 2 * 128 * 2}
    assert found.chosen is not None and found.command is not None
    assert found.command.startswith(f"quire serve model -tp {found.chosen.layout.tensor}")


def test_70b_on_one_gpu_says_what_would_fit() -> None:
    found = plan(LLAMA3_70B, "H100")
    assert found.chosen is None and found.command is None
    assert found.would_fit == (
        "3xH100 with -pp 3",
        "4xH100 with -tp 4",
        "1xB200",
        "--quantization int4 on these GPUs",
    )


def test_fewer_requests_at_once_need_less() -> None:
    assert "--max-num-seqs 256 on these GPUs" in plan(LLAMA3_8B, "L4").would_fit


def test_a_shorter_length_is_recommended() -> None:
    config = LLAMA3_8B | {"max_position_embeddings": 131072}
    found = plan(config, "RTX4090", 131072, quantization="fp8")
    assert found.chosen is not None and found.max_model_len < 131072
    assert f"--max-model-len {found.max_model_len}" in str(found.command)
    assert plan(config, "RTX4090", 131072, quantization="fp8", may_shorten=False).chosen is None


def test_a_window_costs_no_more_than_its_tokens() -> None:
    found = plan(GEMMA3_27B, "H200", 65536)
    assert found.chosen is not None
    memory = found.chosen.memory
    per_layer = 2 * 16 * 128 * 2
    assert memory.bytes_per_token == {"window 1024": 52 * per_layer, "full": 10 * per_layer}
    everywhere = {"text_config": GEMMA3_27B["text_config"] | {"model_type": "llama", "tie_word_embeddings": True}}
    full = plan(GEMMA3_27B | everywhere, "H200", 65536)
    assert full.chosen is not None and memory.capacity_requests > 3 * full.chosen.memory.capacity_requests


def test_kv_capacity_is_that_of_the_card() -> None:
    """2026-11-16-h200-card-seams.json: 67,866 blocks of 16 tokens."""
    config = MODEL_SHAPES["qwen3-0.6b"]
    limits = Limits(8192, max_num_batched_tokens=16384, utilization=0.88)
    found = rank_memory(read_shape(config), read_format(config, None, 2), Layout(), GPUS["H200"].memory, limits)
    assert found.capacity_tokens == pytest.approx(67866 * 16, rel=0.03)


def test_more_ranks_are_faster_for_one_request() -> None:
    found = plan(LLAMA3_70B, "8xH100")
    times = {each.layout: each.speeds[0].token_ms for each in found.candidates if each.held}
    assert times[Layout(8)] < times[Layout(4)]  # type: ignore[operator]
    assert times[Layout(4, 2)] > times[Layout(4)]  # type: ignore[operator]  # a hand-over more


def test_layers_of_stages() -> None:
    assert stage_ranges(8, 2) == [range(4), range(4, 8)]
    assert [len(each) for each in stage_ranges(10, 4)] == [2, 3, 3, 2]
    assert [len(each) for each in stage_ranges(11, 4)] == [3, 3, 3, 2]


def test_steps_of_a_workload() -> None:
    """Three prompts of 8 in steps of 16 tokens, two tokens each."""
    steps = workload_steps([8, 8, 8], [2, 2, 2], {None}, 4, 16)
    assert [(step.tokens, step.rows) for step in steps] == [(16, 2), (10, 3), (1, 1)]
    assert steps[0].prompt_pairs == {None: 2 * 36} and steps[1].decode_keys == {None: 2 * 9}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must be a whole number from 1 to 1024"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_key_value_heads": 5}, "does not divide"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "there are 8 experts"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "wrong type"),
        ({"use_sliding_window": True, "sliding_window": 24, "layer_types": ["full_attention"]}, "names 1 layers"),
        ({"quantization_config": {"quant_method": "hqq"}}, "allowed: fp8, gptq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "wrong type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits of quantization_config"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
    ],
)
def test_a_broken_config_says_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(LLAMA3_8B | changed, "H100")
