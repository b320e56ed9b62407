"""Adapters that peft writes: each request gets the tokens that peft's own model gives, whoever else is in the batch."""

import json
import os
import shutil

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.messages.lora import LoRARequest
from tests.tiny_models import greedy, prompts, save_tiny

peft = pytest.importorskip("peft")

COUNT = 16
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = {
    "target_modules": LINEARS[:4],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
VARIANTS = [
    {"r": 8, "lora_alpha": 16, "target_modules": LINEARS},
    {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj", "v_proj"]},
    {"r": 5, "lora_alpha": 7, "target_modules": ["gate_proj", "down_proj", "k_proj"]},
    {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": LINEARS},
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEARS,
        "rank_pattern": {"q_proj": 9, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"o_proj": 3, "layers.0.self_attn.q_proj": 20},
    },
    {"r": 3, "lora_alpha": 6, "target_modules": LINEARS, "layers_to_transform": [1]},
    {"r": 12, "lora_alpha": 12, "target_modules": ["up_proj"]},
    {"r": 2, "lora_alpha": 2, "target_modules": LINEARS, "use_rslora": True},
]
MIXTURE = [
    {"r": 4, "lora_alpha": 8, **EXPERTS},
    {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "o_proj"]},
    {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
]
PROMPTS = prompts((5, 40, 17, 33, 9, 64, 21, 12, 30, 8))


# Outputs in another order than ours, linears that are stored transposed or fused, latents, experts in one parameter.
FAMILIES = {
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "gpt-neox": {"target_modules": "all-linear"},
    "cohere": {"target_modules": "all-linear"},
    "phi3": {"target_modules": "all-linear", "alpha_pattern": {r"layers\.1\.self_attn\.qkv_proj": 2}},
    "glm": {"target_modules": "all-linear"},
    "falcon-40b": {"target_modules": "all-linear"},
    "deepseek-v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "gpt-oss": EXPERTS | {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 3}},
}
# Those that are tried in every run; the others by `make test-models`.
CORE = FAMILIES if os.environ.get("QUIRE_ALL_MODELS") else ("gpt2", "cohere", "deepseek-v3", "gpt-oss")


class Adapted:
    """A tiny model, peft's adapters of it, and what it gives with each (index 0: without)."""

    def __init__(self, family, folder):
        self.path = folder / "base"
        save_tiny(family, self.path)
        variants = MIXTURE if family == "mixtral" else VARIANTS
        self.numbers = [(1 + i) % (1 + len(variants)) for i in range(len(PROMPTS))]
        self.adapters = [folder / f"adapter{i}" for i in range(1, 1 + len(variants))]
        self.texts = [[] for _ in PROMPTS]
        for number, variant in enumerate([None, *variants]):
            torch.manual_seed(number)
            model = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            if variant is not None:
                model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **variant))
                model.save_pretrained(self.adapters[number - 1])
            for i, prompt in enumerate(PROMPTS):
                if self.numbers[i] == number:
                    self.texts[i] = greedy(model, prompt, COUNT)[0]

    def lora(self, number):
        return LoRARequest(f"a{number}", number, str(self.adapters[number - 1])) if number else None

    def llm(self, **options):
        given = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, "max_loras": 4}
        if self.path.parent.name.startswith("mixtral"):
            given["lora_target_modules"] = (*LINEARS[:4], "experts")
        return LLM(str(self.path), skip_tokenizer_init=True, enable_lora=True, **(given | options))


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "mixtral"])
def adapted(request, tmp_path_factory):
    return Adapted(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 33, "async_scheduling": False},
        {"max_loras": 2, "num_gpu_blocks_override": 24, "max_model_len": 96},
    ],
    ids=["batched", "chunked, depth 0", "preempted, few slots"],
)
def test_tokens_are_those_of_peft(adapted, settings):
    loras = [adapted.lora(number) for number in adapted.numbers]
    with adapted.llm(**settings) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, False, loras)
            assert [list(one.outputs[0].token_ids) for one in outputs] == adapted.texts
    assert len({tuple(text) for text in adapted.texts}) == len(PROMPTS)


@pytest.mark.parametrize("family", CORE)
def test_layers_of_families(family, tmp_path):
    model = save_tiny(family, tmp_path / "base")
    config = peft.LoraConfig(init_lora_weights=False, **({"r": 4, "lora_alpha": 8} | FAMILIES[family]))
    model = peft.get_peft_model(model, config)
    model.save_pretrained(tmp_path / "adapter")
    modules = ("experts",) if "target_parameters" in FAMILIES[family] else ()
    options = {"lora_target_modules": (*LINEARS[:4], *modules)} if modules else {}
    options |= {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_model_len": 128, "skip_tokenizer_init": True}
    with LLM(str(tmp_path / "base"), enable_lora=True, **options) as llm:
        lora = LoRARequest("a", 1, str(tmp_path / "adapter"))
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[:3]], GREEDY, False, lora)
    assert [list(one.outputs[0].token_ids) for one in outputs] == [greedy(model, p, COUNT)[0] for p in PROMPTS[:3]]


def test_what_is_no_linear_layer_here(tmp_path):
    """Latents become keys and values inside of attention."""
    model = save_tiny("deepseek-v3", tmp_path / "base")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["kv_b_proj"])).save_pretrained(tmp_path / "adapter")
    options = {"kv_cache_memory_bytes": 1 << 24, "skip_tokenizer_init": True}
    with (
        LLM(str(tmp_path / "base"), enable_lora=True, **options) as llm,
        pytest.raises(ValueError, match="kv_b_proj takes no adapter in this model"),
    ):
        llm.llm_engine.add_lora(LoRARequest("a", 1, str(tmp_path / "adapter")))


def test_latent_attention_and_experts_with_shared_ones_among_them(tmp_path):
    linears = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    save_tiny("deepseek-v3", tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = greedy(model, PROMPTS[1], COUNT)[0]
    torch.manual_seed(1)
    config = peft.LoraConfig(init_lora_weights=False, r=4, **(EXPERTS | {"target_modules": linears}))
    model = peft.get_peft_model(model, config)
    model.save_pretrained(tmp_path / "adapter")
    adapted = greedy(model, PROMPTS[1], COUNT)[0]
    given = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, "skip_tokenizer_init": True}
    lora = LoRARequest("a", 1, str(tmp_path / "adapter"))
    with LLM(str(tmp_path / "base"), enable_lora=True, lora_target_modules=(*linears, "experts"), **given) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPTS[1]}] * 2, GREEDY, False, [lora, None])
    assert [list(one.outputs[0].token_ids) for one in outputs] == [adapted, plain]
    assert adapted != plain


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    model = save_tiny("llama", folder / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(init_lora_weights=False, r=4, target_modules=["q_proj", "up_proj"])
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    with LLM(str(folder / "base"), skip_tokenizer_init=True, enable_lora=True, kv_cache_memory_bytes=1 << 24) as llm:
        yield llm, folder / "adapter"


def edited(path, folder, tensors=None, **config):
    """A copy of an adapter with some of it changed."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, folder)
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    if tensors is not None:
        save_file(tensors(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG = {
    "dora": ({"use_dora": True}, None, "use_dora is True, which is not supported"),
    "biases": ({"bias": "all"}, None, "bias is 'all', which is not supported"),
    "modules": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save .* is not supported"),
    "kind": ({"peft_type": "IA3"}, None, "peft_type is 'IA3'; supported: LORA"),
    "rank": ({"r": 0}, None, "r is 0; it must be a whole number from 1 to 512"),
    "alpha": ({"lora_alpha": "x"}, None, "lora_alpha is 'x'; it must be a number"),
    "pattern": ({"rank_pattern": {"(a*)*b": 2}}, None, "which is not supported"),
    "nested pattern": ({"rank_pattern": {"((a+))+b": 2}}, None, "which is not supported"),
    "long pattern": ({"alpha_pattern": {".*.*.*.*.*x": 2}}, None, "which is not supported"),
    "choices": ({"alpha_pattern": {"(.|.)" * 30: 2}}, None, "which is not supported"),
    "base": ({"init_lora_weights": "pissa_niter_4"}, None, "'pissa_niter_4', which changes the base too"),
    "other rank": ({"rank_pattern": {"q_proj": 2}}, None, "q_proj has factors of rank 4; adapter_config.json says 2"),
    "many digits": ({"lora_alpha": 10**400}, None, "lora_alpha is a number of 1329 bits; it must be a number"),
    "switch": ({"use_rslora": "no"}, None, "use_rslora is 'no'; it must be true or false"),
    "parameters": ({"target_parameters": 5}, None, "target_parameters is 5; it must be a list of names"),
    "scale": ({"lora_alpha": 1e300}, None, "not finite once scaled"),
    "twice": ({}, lambda t: t | {f"{Q}.lora_A.b.weight": t[f"{Q}.lora_A.weight"].clone()}, "has lora_A twice"),
    "long name": ({}, lambda t: t | {"x" * 600 + f"{Q}.lora_A.weight": torch.ones(2, 2)}, "xxx is none of lora_A"),
    "same layer": (
        {},
        lambda t: t | {k.replace(".model.model.", ".model."): v.clone() for k, v in t.items() if Q in k},
        "is a layer that another of its modules is too",
    ),
    "missing": ({}, lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_B.weight"}, "q_proj lacks lora_B.weight"),
    "shape": ({}, lambda t: t | {f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"][:, 1:].contiguous()}, "another base"),
    "name": ({}, lambda t: {k.replace("q_proj", "x_proj"): v for k, v in t.items()}, "x_proj takes no adapter"),
    "tensor": ({}, lambda t: t | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head.weight is none of"),
    "values": ({}, lambda t: {k: v / 0 for k, v in t.items()}, "values that are not finite"),
    "high": (
        {"r": 20},
        lambda t: {k: v.repeat(5, 1) if "lora_A" in k else v.repeat(1, 5) for k, v in t.items()},
        r"its rank is 20; at most 16 is allowed \(--max-lora-rank\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_an_adapter_is_said(one, case, tmp_path):
    llm, path = one
    config, tensors, message = WRONG[case]
    wrong = edited(path, tmp_path / case, tensors, **config)
    with pytest.raises(ValueError, match=message):
        llm.llm_engine.add_lora(LoRARequest("wrong", 7, str(wrong)))
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPTS[0]], GREEDY, False, LoRARequest("wrong", 7, str(wrong)))
    good = LoRARequest("good", 1, str(path))
    assert llm.generate([PROMPTS[0]], GREEDY, False, good)[0].lora_request == good


def test_a_folder_that_is_none(one, tmp_path):
    llm, path = one
    for wrong, message in ((tmp_path / "nowhere", "there is no folder"), (tmp_path, "has no adapter_config.json")):
        with pytest.raises(ValueError, match=message):
            llm.llm_engine.add_lora(LoRARequest("wrong", 8, str(wrong)))
    for arguments, message in (
        (("x", 0, "p"), "lora_int_id is 0"),
        (("", 1, "p"), "lora_name is"),
        (("x", 1), "lora_path"),
        (("x", 1, "p", 5), "base_model_name is '5'"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRARequest(*arguments)
    with pytest.raises(ValueError, match="2 prompts but 1 lora_requests"):
        llm.generate(PROMPTS[:2], GREEDY, False, [LoRARequest("a", 1, str(path))])
    with pytest.raises(ValueError, match="must be a LoRARequest"):
        llm.generate(PROMPTS[:2], GREEDY, False, object())


def test_pickled_weights(one, tmp_path):
    """Read by torch's restricted loader; the same adapter has the same content."""
    from safetensors.torch import load_file

    llm, path = one
    shutil.copytree(path, tmp_path / "pickled")
    tensors = load_file(tmp_path / "pickled" / "adapter_model.safetensors")
    (tmp_path / "pickled" / "adapter_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pickled" / "adapter_model.bin")
    loras = [LoRARequest("good", 1, str(path)), LoRARequest("pickled", 2, str(tmp_path / "pickled"))]
    texts = [llm.generate([PROMPTS[5]], GREEDY, False, lora)[0].outputs[0].token_ids for lora in loras]
    assert texts[0] == texts[1]
