"""DeepSeek's models beyond parity of one rank: prediction layers as drafts, quantized weights, ranks, errors."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.layers.parallel import TensorParallel
from quire.models.implementation import choose_implementation
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.spec_decode.mtp import MTPProposer
from quire.worker import recorded
from tests.engine.test_recorded import answers
from tests.models.deepseek_checkpoints import dequantized_state, quantize_to_blocks, save_with_mtp
from tests.quantization.int_checkpoints import gptq, save_checkpoints
from tests.spec_decode.heads import PROPOSED, Noting, rms_norm
from tests.tiny_models import COMMON, DEEPSEEK, prompts, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = prompts((5, 33, 70))


def generate(model: str, **arguments) -> list[list[int]]:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_model_len": 256, "spec_adaptive": False}
    settings |= arguments  # drafts are tried whether or not they pay on this machine
    with LLM(model, skip_tokenizer_init=True, **settings) as llm:
        texts = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        if "speculative_config" in settings:
            found = {metric.name: metric for metric in llm.get_metrics()}
            assert found["quire:spec_decode_num_draft_tokens"].value > 0
        return texts


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory):
    return save_with_mtp(tmp_path_factory.mktemp("v3"))


def test_text_is_the_same_with_drafts_of_the_prediction_layer(with_mtp):
    plain = generate(with_mtp)
    assert generate(with_mtp, speculative_config={"method": "mtp", "num_speculative_tokens": 2}) == plain
    chunked = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 20}
    assert generate(with_mtp, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) == plain
    drafted = {"method": "deepseek_mtp", "num_speculative_tokens": 1}
    assert generate(with_mtp, speculative_config=drafted, **chunked) == plain


def test_fp8_in_blocks(tmp_path):
    """The text of the same checkpoint without quantization: on a CPU weights are dequantized while loading."""
    (tmp_path / "fp8").mkdir()
    save_with_mtp(tmp_path / "fp8")
    config = (tmp_path / "fp8" / "config.json").read_text()
    quantize_to_blocks(tmp_path / "fp8")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(config)
    plain = dequantized_state(tmp_path / "fp8")
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    texts = generate(str(tmp_path / "plain"))
    assert generate(str(tmp_path / "fp8")) == texts
    drafted = {"method": "mtp", "num_speculative_tokens": 1}
    assert generate(str(tmp_path / "fp8"), speculative_config=drafted) == texts


class NotingMTP(Noting, MTPProposer):
    pass


def test_drafts_are_those_of_the_layer(with_mtp):
    """It is a copy of the last layer, so transformers' code for that computes them."""
    PROPOSED.clear()
    generate(with_mtp, speculative_config={"method": f"{__name__}:NotingMTP", "num_speculative_tokens": 1})
    assert len(PROPOSED) > 30
    model = transformers.AutoModelForCausalLM.from_pretrained(with_mtp, dtype=torch.float32).eval()
    own = load_file(f"{with_mtp}/model.safetensors")
    weight = {name: own[f"model.layers.4.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    for known, drafts in PROPOSED[::5]:
        with torch.inference_mode():
            states = model.model(torch.tensor([known[:-1]])).last_hidden_state
            embeds = model.model.embed_tokens(torch.tensor([known[1:]]))
            pair = torch.cat((rms_norm(embeds, weight["enorm"]), rms_norm(states, weight["hnorm"])), -1)
            x = pair @ weight["eh_proj"].T
            angles = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
            x = model.model.layers[-1](x, position_embeddings=angles, attention_mask=mask)
            logits = model.lm_head(rms_norm(x[0, -1], weight["shared_head.norm"]))
        assert drafts == [int(logits.argmax())], len(known)


def test_a_checkpoint_without_prediction_layers(tmp_path):
    save_tiny("kimi-k2", tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="no prediction layer"):
        generate(str(tmp_path), speculative_config={"method": "mtp", "num_speculative_tokens": 1})


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_two_ranks(with_mtp, sizes):
    assert generate(with_mtp, **sizes) == generate(with_mtp)


def test_gptq(tmp_path):
    """Rotated rows are packed among others, so weights are not reordered; latents are expanded by dequantized ones."""
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
    more = {"intermediate_size": 128, "tie_word_embeddings": True}
    ours, plain = save_checkpoints("deepseek-v3", tmp_path, gptq(), **sizes, **more)
    texts = generate(str(plain))
    assert generate(str(ours), quantization="dequantized") == texts
    mine, theirs = (torch.tensor(each) for each in (generate(str(ours)), texts))
    assert (mine == theirs).float().mean() > 0.5  # in C inputs are rounded too


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v3"])
def test_steps_in_bf16_are_replayed(tmp_path, family, monkeypatch):
    save_tiny(family, tmp_path, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=16, v_head_dim=24)
    replayed, count = answers(str(tmp_path), dtype="bfloat16")
    assert count >= 8 + 7 * 4
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert answers(str(tmp_path), dtype="bfloat16") == (replayed, 0)


def configured(architecture: str, **keys):
    hf = COMMON | DEEPSEEK | {"architectures": [architecture]} | keys
    return model_class(hf).read_config(hf)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"v_head_dim": None, "qk_rope_head_dim": None}, "lacks qk_rope_head_dim, v_head_dim"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even"),
        ({"kv_lora_rank": 2**40}, "kv_lora_rank is"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias needs q_lora_rank"),
    ],
)
def test_configs_that_make_no_sense(keys, complaint):
    with pytest.raises(ValueError, match=complaint):
        configured("DeepseekV3ForCausalLM", **keys)


@pytest.mark.parametrize(
    ("architecture", "keys", "complaint"),
    [
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported .*: sigmoid"),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; supported .*: greedy, group",
        ),
        ("Dots1ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported .*: noaux_tc, sigmoid"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 8"),
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "8 experts cannot be split into 3 equal groups"),
    ],
)
def test_experts_that_make_no_sense(architecture, keys, complaint):
    hf = COMMON | DEEPSEEK | keys
    with pytest.raises(ValueError, match=complaint):
        model_class({"architectures": [architecture]}).configure_experts(hf)


@pytest.mark.parametrize(
    "keys", [{"indexer_types": ["full", "shared"]}, {"index_topk_freq": 2}, {"index_topk_pattern": "FS"}]
)
def test_layers_that_share_an_index(keys):
    given = {"q_lora_rank": 28, "index_topk": 24, "index_n_heads": 6, "index_head_dim": 16}
    with pytest.raises(ValueError, match=r"the index of a layer before .* not supported yet .indexer_types"):
        configured("GlmMoeDsaForCausalLM", **given, **keys)
    assert configured("GlmMoeDsaForCausalLM", **given).latent.index.interleaved


@pytest.mark.parametrize(
    ("architecture", "kind", "missing"),
    [
        ("DeepseekV4ForCausalLM", "deepseek_v4", "attention over compressed tokens"),
        ("KimiK25ForConditionalGeneration", "kimi_k25", "the encoder of images and videos"),
        ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "attention to blocks of keys"),
        ("Glm5NextForConditionalGeneration", "glm5_next", "layers with a recurrent state"),
    ],
)
def test_the_newest_generation_is_refused_with_what_is_missing(architecture, kind, missing):
    choice = choose_implementation({"architectures": [architecture], "model_type": kind})
    assert choice.impl is None
    assert f"{architecture} is not supported yet; missing: {missing}" in choice.reason


def test_heads_that_ranks_cannot_divide(tmp_path):
    hf = COMMON | DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 28}
    options = ModelOptions(torch.float32, torch.device("meta"), TensorParallel(0, 3))
    with pytest.raises(ValueError, match=r"\(4\) cannot be divided among 3 tensor-parallel workers"):
        model_class(hf)(hf | {"vocab_size": 210}, options)
