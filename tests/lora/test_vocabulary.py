"""Adapters of embeddings and heads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import SamplingParams
from quire.messages.lora import LoRARequest

pytest.importorskip("peft")

from tests.lora.peft_models import COUNT, GREEDY, PROMPTS, PeftModel

THREADS = "tests.executor.threads:ThreadsExecutor"
VARIANTS = [
    {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]},
    {"r": 8, "lora_alpha": 4, "target_modules": ["lm_head"]},
    {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "down_proj"], "use_rslora": True},
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    """Gemma's head is tied to the embedding, which it scales; an adapter of one is not the other's."""
    return PeftModel(tmp_path_factory.mktemp(request.param), request.param, VARIANTS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 33, "async_scheduling": False, "max_loras": 2},
        {"distributed_executor_backend": THREADS},
        {"spec_method": "ngram", "spec_tokens": 3},
    ],
    ids=["batched", "chunked, few slots", "two ranks", "drafts"],
)
def test_tokens_are_those_of_peft(adapted: PeftModel, settings: dict[str, object]) -> None:
    assert adapted.served(**settings) == adapted.texts


def test_logprobs_of_prompts_have_the_terms_of_the_head(adapted: PeftModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    with adapted.llm() as llm:
        outputs = adapted.generated(llm, params)
    for output, number, prompt in zip(outputs, adapted.numbers, PROMPTS, strict=True):
        with torch.no_grad():
            wanted = adapted.models[number](torch.tensor([prompt])).logits[0].log_softmax(-1)
        for at in range(1, len(prompt)):
            assert output.prompt_logprobs[at][prompt[at]].logprob == pytest.approx(
                float(wanted[at - 1, prompt[at]]), abs=1e-3
            )


def test_packed_weights(tmp_path: Path) -> None:
    """Steps that are replayed, in bf16: as likely tokens as those of peft in float32."""
    adapted = PeftModel(tmp_path, "llama", VARIANTS)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    with adapted.llm(dtype="bfloat16") as llm:
        outputs = adapted.generated(llm, params)
    for output, number, prompt in zip(outputs, adapted.numbers, PROMPTS, strict=True):
        tokens, found = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        with torch.no_grad():
            logits = adapted.models[number](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1)[range(COUNT), tokens]
        ours = torch.tensor([entry[token].logprob for entry, token in zip(found, tokens, strict=True)])
        assert (theirs - ours).abs().mean() < 0.2


def test_they_can_be_left_out(adapted: PeftModel) -> None:
    message = r"embed_tokens takes no adapter .* --lora-target-modules .* if embed_tokens is among them"
    with adapted.llm(lora_target_modules=("all-linear",)) as llm, pytest.raises(ValueError, match=message):
        llm.llm_engine.add_lora(adapted.lora(1))
    named = ("q_proj", "embed_tokens", "lm_head", "down_proj")
    assert adapted.served(lora_target_modules=named) == adapted.texts


def test_a_slot_has_the_rank_of_each_layer(adapted: PeftModel) -> None:
    """0 where its adapter has nothing, so that kernels pass over it; anew for the next adapter."""
    with adapted.llm(max_loras=1) as llm:
        model = llm.llm_engine.client.core.executor.worker.model
        of = {name.rpartition(".")[2]: module for name, module in model.named_modules() if hasattr(module, "low_rank")}
        for number, wanted in ((1, (4, 0, 4, 0)), (2, (0, 8, 0, 0)), (3, (3, 3, 0, 3)), (1, (4, 0, 4, 0))):
            llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, False, adapted.lora(number))
            named = ("embed_tokens", "lm_head", "qkv_proj", "down_proj")
            assert tuple(int(of[name].low_rank.ranks[0]) for name in named) == wanted


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"ensure_weight_tying": True}, {}, "ensure_weight_tying with .*embed_tokens is not supported"),
        ({}, {"base_model.model.model.embed_tokens.base_layer.weight": (230, 64)}, "was .230, 64. in training"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": (4, 230)}, "an adapter for another base"),
    ],
)
def test_other_vocabularies(
    adapted: PeftModel, tmp_path: Path, config: dict[str, object], tensors: dict[str, tuple[int, int]], message: str
) -> None:
    shutil.copytree(adapted.adapters[0], tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said | config))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.ones(shape) for name, shape in tensors.items()}, file)
    with adapted.llm() as llm, pytest.raises(ValueError, match=message):
        llm.llm_engine.add_lora(LoRARequest("x", 9, str(tmp_path / "adapter")))
