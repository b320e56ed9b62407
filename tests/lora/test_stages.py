"""Adapters of a model whose layers are in several stages: each stage has the factors of its own."""

from pathlib import Path

import pytest

pytest.importorskip("peft")

from tests.lora.peft_models import PeftModel

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = [
    {"r": 8, "lora_alpha": 16, "target_modules": LINEARS},
    {"r": 2, "lora_alpha": 4, "target_modules": LINEARS, "layers_to_transform": [3]},  # of one stage alone
    {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    return PeftModel(tmp_path_factory.mktemp("stages"), "qwen3", VARIANTS)


@pytest.mark.parametrize("executor", ["FourStages", "TwoByTwo"])
def test_tokens_are_those_of_peft(adapted: PeftModel, executor: str) -> None:
    assert adapted.served(distributed_executor_backend=f"tests.executor.stages:{executor}") == adapted.texts


def test_processes(adapted: PeftModel) -> None:
    assert adapted.served(pipeline_parallel_size=2) == adapted.texts


def test_layers_that_no_stage_has(adapted: PeftModel, tmp_path: Path) -> None:
    larger = PeftModel(tmp_path, "qwen3", [VARIANTS[0]], num_hidden_layers=6)
    with (
        adapted.llm(distributed_executor_backend="tests.executor.stages:TwoStages") as llm,
        pytest.raises(ValueError, match=r"layers\.4\.\w+\.\w+ takes no adapter in this model"),
    ):
        llm.llm_engine.add_lora(larger.lora(1))
