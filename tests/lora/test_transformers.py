"""Adapters of models that transformers runs."""

from pathlib import Path

import pytest

pytest.importorskip("peft")

from tests.lora.peft_models import PeftModel

THREADS = "tests.executor.threads:ThreadsExecutor"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = [
    {"r": 8, "lora_alpha": 16, "target_modules": LINEARS},
    {"r": 3, "lora_alpha": 7, "target_modules": ["up_proj", "v_proj"], "rank_pattern": {"up_proj": 5}},
    {"r": 4, "lora_alpha": 4, "target_modules": ["o_proj", "gate_proj", "lm_head"], "use_rslora": True},
]
FAMILIES = {
    "llama": VARIANTS,
    "gpt2": [{"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}],
    "mixtral": [{"r": 4, "target_modules": LINEARS[:4]}],
}


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    return PeftModel(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param])


@pytest.mark.parametrize("settings", [{}, {"distributed_executor_backend": THREADS}], ids=["one", "two ranks"])
def test_tokens_are_those_of_peft(adapted: PeftModel, settings: dict[str, object]) -> None:
    if settings and adapted.path.parent.name.startswith("gpt2"):
        pytest.skip("transformers has no plan to share it")
    assert adapted.served(model_impl="transformers", **settings) == adapted.texts


def test_what_takes_none(tmp_path: Path) -> None:
    """Experts, and an embedding."""
    for name, target in (("experts", {"target_parameters": ["mlp.experts.down_proj"]}), ("embed_tokens", {})):
        family = "mixtral" if target else "llama"
        variant = {"r": 2, "target_modules": ["embed_tokens"] if not target else []} | target
        adapted = PeftModel(tmp_path / name, family, [variant])
        options = {"model_impl": "transformers", "lora_target_modules": ("all-linear", name)}
        with adapted.llm(**options) as llm, pytest.raises(ValueError, match=rf"{name}.* takes no adapter"):
            llm.llm_engine.add_lora(adapted.lora(1))
