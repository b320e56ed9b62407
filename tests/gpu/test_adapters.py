"""Adapters on a GPU: their kernels, and requests with different ones and none in graphs, fused steps and large ones."""

import pytest
import torch

from quire import SamplingParams
from tests.kernels import lora_cases
from tests.lora.random_adapters import COUNT, GREEDY, LORA_IDS, PROMPTS, Case, runner, texts
from tests.tiny_models import greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCORED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", lora_cases.SLOTS)
@pytest.mark.parametrize("layer", lora_cases.LAYERS)
def test_low_rank_terms(layer, slots, dtype):
    lora_cases.check(layer, slots, "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [200, 257, 2100])
def test_many_tokens(count, dtype):
    lora_cases.check_many_tokens("cuda", dtype, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(30, 72), (200, 256), (2100, 256)])
def test_gated(count, width, dtype):
    lora_cases.check_gated("cuda", dtype, count, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[1], [0, 1], [-1, 0], [2, -1]])
@pytest.mark.parametrize("case", lora_cases.ROW_CASES)
def test_rows_whose_terms_the_base_product_has(case, slots, dtype):
    lora_cases.check_rows(case, slots, "cuda", dtype)


@pytest.mark.parametrize("slots", [[1], [0, -1]])
@pytest.mark.parametrize("quantized", lora_cases.GROUPS)
@pytest.mark.parametrize("case", ["query, key, value in one step", "gate and up in one step"])
def test_rows_of_quantized_weights(case, quantized, slots):
    lora_cases.check_rows(case, slots, "cuda", torch.bfloat16, quantized)


def test_kernels_of_slots_and_infinite_weights():
    lora_cases.check_slots_of_tokens("cuda")
    lora_cases.check_rank_0_leaves_outputs_as_they_are("cuda", torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        lora_cases.check_an_infinite_weight_stays_with_its_rows("cuda", dtype)


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param), experts=request.param == "qwen3-moe")


@pytest.fixture(scope="module", params=["llama", "qwen3-moe", "attention of qwen3-moe"])
def small(request, tmp_path_factory):
    """Weights as large as real ones; those of `case` are larger, and so are their rounding errors. In the last one
    experts run by the usual kernels."""
    family = request.param.split()[-1]
    folder = tmp_path_factory.mktemp("small")
    return Case(family, folder, experts=request.param == "qwen3-moe", initializer_range=0.02)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("copies", [1, 6])
def test_each_request_gets_the_text_of_its_merged_model(case, eager, copies):
    with case.engine(device="cuda", enforce_eager=eager, max_num_seqs=64) as engine:
        graphs = runner(engine).graphs
        assert eager or {key.adapters for key in graphs._captured} == {False, True}
        found = case.complete(engine, PROMPTS * copies, LORA_IDS * copies, GREEDY)
        assert texts(found) == case.texts * copies


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 33}, {"num_gpu_blocks_override": 22}])
def test_chunks_and_preemption(case, settings):
    with case.engine(device="cuda", **settings) as engine:
        assert texts(case.complete(engine, PROMPTS, LORA_IDS, GREEDY)) == case.texts


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_few_rows_in_bf16(small, count, eager):
    """One or two rows take the fused path, without adapters and with."""
    with small.engine(device="cuda", dtype="bfloat16", enforce_eager=eager) as engine:
        if count <= 2 and small.models[0].config.model_type == "llama":
            model = runner(engine).model
            assert model.max_fused_rows >= count and all(layer.fuses_terms for layer in model.layers)
        for lora_ids in ([1, 2, *LORA_IDS][:count], [0] * count, [0, 3, *LORA_IDS][:count]):
            found = small.complete(engine, PROMPTS[:count], lora_ids, SCORED)
            assert small.worst_error(found, PROMPTS[:count], lora_ids) < 0.02
            others = [(lora_id + 1) % 4 for lora_id in lora_ids]
            assert count < 8 or small.worst_error(found, PROMPTS[:count], others) > 0.05


@pytest.mark.parametrize("count", [1, 2, 8])
def test_steps_without_adapters_have_the_bits_of_an_engine_without_them(small, count):
    def answers(**settings):
        with small.engine(device="cuda", dtype="bfloat16", **settings) as engine:
            found = small.complete(engine, PROMPTS[:count], [0] * count, SCORED)
            captured = runner(engine).graphs._captured
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found], len(captured)

    with_capacity, captured = answers()
    without = {"enable_lora": False, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": None}
    assert answers(**without) == (with_capacity, captured // 2)


def test_a_slot_is_refilled_behind_its_last_reader(case):
    """Steps are only enqueued: the copies into the slot must come after those that still read it."""
    prompt = PROMPTS[1]
    with case.engine(device="cuda", max_loras=1) as engine:
        for lora_id in (1, 2, 3, 1):
            output = case.complete(engine, [prompt], [lora_id], GREEDY)
            assert texts(output)[0] == greedy(case.models[lora_id], prompt, COUNT)[0]
