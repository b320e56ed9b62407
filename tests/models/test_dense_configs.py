"""What single keys of the dense families' configs mean, and what is refused."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.resolve_config import longest_sequence
from quire.models.loading.weight_loader import load_weights
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.quantization.select import choose_quantization
from tests.models.helpers import CPU, MemoryTensor, TinyRunner, ours_from, tensors_of
from tests.tiny_models import COMMON, LONGROPE, greedy, prompts, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def configured(architecture, **keys):
    hf = COMMON | {"architectures": [f"{architecture}ForCausalLM"]} | keys
    return model_class(hf).configure(hf)


def test_gemmas_gelu_is_the_tanh_approximation():
    assert configured("Gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert configured("Gemma").tie_word_embeddings and configured("Gemma").head_dim == 256


def test_gemma_scales_queries_by_its_own_scalar():
    assert configured("Gemma2", query_pre_attn_scalar=144).attention_scale == pytest.approx(1 / 12)


def test_gemma2_alternates_windows():
    assert configured("Gemma2", sliding_window=8).windows == (8, None, 8, None)


def test_gemma3_reads_the_older_rope_keys():
    keys = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = configured("Gemma3", sliding_window=8, sliding_window_pattern=2, head_dim=16, **keys)
    assert config.windows == (8, None, 8, None)
    assert [rope.theta for rope in config.ropes] == [2e4, 5e5, 2e4, 5e5]
    assert [type(rope.scaling).__name__ for rope in config.ropes[:2]] == ["Unscaled", "Linear"]
    assert {rope.max_positions for rope in config.ropes} == {512}  # already the stretched length
    assert longest_sequence(COMMON | keys | {"model_type": "gemma3_text"}) == 512


def test_phi3_windows_wider_than_the_context_are_none():
    assert set(configured("Phi3", sliding_window=262144).windows) == {None}
    assert set(configured("Phi3", sliding_window=24).windows) == {24}


def test_smollm3_rotates_where_the_config_says():
    config = configured("SmolLM3", no_rope_layers=[1, 0, 1, 1])
    assert [rope is not None for rope in config.ropes] == [True, False, True, True]
    assert configured("SmolLM3").ropes[3] is None


@pytest.mark.parametrize(
    ("architecture", "keys", "complaint"),
    [
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma", {"hidden_activation": "mish"}, "'mish' is not supported; supported: silu"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma2", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention; supported"),
        ("Gemma2", {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ("Olmo3", {"num_attention_heads": None}, "lacks num_attention_heads"),
        ("Phi3", {"rope_scaling": {"type": "su", "long_factor": 2.0}}, "need a list"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers"),
    ],
)
def test_refused(architecture, keys, complaint):
    with pytest.raises(ValueError, match=complaint):
        configured(architecture, **keys)


def test_longrope_factors_follow_max_model_len(tmp_path):
    """Up to the original length the short factors, beyond it the long ones: as transformers for every sequence that is
    on one side of it from the prompt on."""
    model = save_tiny("phi3-longrope", tmp_path, original_max_position_embeddings=64, max_position_embeddings=256)
    short, long = prompts((20, 70))
    for prompt, limit in ((short, 64), (long, None)):
        wanted, _ = greedy(model, prompt, 24)
        with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=limit) as llm:
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == wanted


def test_phi3_calls_longrope_su(tmp_path):
    model = save_tiny("phi3-longrope", tmp_path)
    (prompt,) = prompts((30,))
    wanted = TinyRunner(ours_from(model), 1).step([(0, prompt)])[0]
    model.config.rope_parameters = LONGROPE | {"rope_type": None, "type": "su"}
    assert torch.equal(TinyRunner(ours_from(model), 1).step([(0, prompt)])[0], wanted)


@pytest.mark.parametrize("per_channel", [False, True])
def test_phi3_in_fp8_has_one_tensor_of_scales_for_several_parts(tmp_path, per_channel):
    model = save_tiny("phi3", tmp_path)
    tensors = []
    for name, weight in model.state_dict().items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 448 if per_channel else weight.abs().amax() / 448
            quantized = (weight / scale).to(torch.float8_e4m3fn)
            tensors += [MemoryTensor(name, quantized), MemoryTensor(f"{name}_scale", scale)]
            weight.copy_(quantized.float() * scale)
        else:
            tensors.append(MemoryTensor(name, weight))
    (prompt,) = prompts((30,))
    wanted = TinyRunner(ours_from(model), 1).step([(0, prompt)])[0]
    eight_bits = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    weights = eight_bits | {"dynamic": False, "strategy": "channel" if per_channel else "tensor"}
    stored = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": eight_bits}},
        "ignore": ["lm_head"],
    }
    hf = model.config.to_dict() | {"architectures": ["Phi3ForCausalLM"], "quantization_config": stored}
    quantization = choose_quantization(None, hf, torch.float32, CPU)
    ours = model_class(hf)(hf, ModelOptions(torch.float32, CPU, quantization=quantization))
    load_weights(ours, tensors, quantization.ignored)
    ours.process_after_loading()
    torch.testing.assert_close(TinyRunner(ours.eval(), 1).step([(0, prompt)])[0], wanted, atol=1e-3, rtol=0)


def test_windowed_layers_hold_only_their_window(tmp_path):
    """Gemma 3: of a long generation the layers with a window keep as many blocks as it spans, the others all."""
    save_tiny("gemma3", tmp_path)
    window, block = 24, 4
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    with LLM(
        str(tmp_path), dtype="float32", skip_tokenizer_init=True, block_size=block, max_num_batched_tokens=32
    ) as llm:
        engine = llm.llm_engine
        scheduler = engine.client.core.scheduler
        engine.add_request("long", prompts((100,))[0], params)
        most = dict.fromkeys(range(len(scheduler.kv.groups)), 0)
        while engine.has_unfinished_requests():
            engine.step()
            for request in scheduler.requests.values():
                for group, blocks in enumerate(request.blocks):
                    held = sum(each is not scheduler.kv.pool.null_block for each in blocks)
                    most[group] = max(most[group], held)
    for group in scheduler.kv.groups:
        if group.window is None:
            assert most[group.index] == 400 // block
        else:
            assert group.window == window
            # A step's tokens beside the window, a block that both begin in, and steps that are in flight.
            assert most[group.index] <= (window + 32) // block + 3


def test_glm_from_a_checkpoint_with_q_k_and_v_in_one_tensor(tmp_path):
    """As llama.cpp's files have it: rotary pairs are neighbours there, too."""
    reference = save_tiny("glm", tmp_path)
    tensors = {tensor.name: tensor.data for tensor in tensors_of(reference)}
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{x}_proj.")) for x in "qkv"]
        tensors[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    hf = reference.config.to_dict() | {"architectures": ["GlmForCausalLM"]}
    fused = model_class(hf)(hf, ModelOptions(torch.float32, CPU))
    load_weights(fused, [MemoryTensor(name, data) for name, data in tensors.items()])
    fused.process_after_loading()
    (prompt,) = prompts((30,))
    both = [TinyRunner(model, 1).step([(0, prompt)])[0] for model in (fused, ours_from(reference))]
    assert torch.equal(*both)


def test_a_head_that_is_no_copy_of_the_embedding_is_not_dropped(tmp_path):
    reference = save_tiny("llama", tmp_path)
    tensors = [tensor for tensor in tensors_of(reference) if tensor.name != "lm_head.weight"]
    hf = reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    embedding = next(tensor.data for tensor in tensors if "embed_tokens" in tensor.name)
    load_weights(
        model_class(hf)(hf, ModelOptions(torch.float32, CPU)), [*tensors, MemoryTensor("lm_head.weight", embedding)]
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding.*tie_word_embeddings"):
        load_weights(
            model_class(hf)(hf, ModelOptions(torch.float32, CPU)),
            [*tensors, MemoryTensor("lm_head.weight", embedding + 1)],
        )


def test_positions_beyond_the_embedding_are_refused(tmp_path):
    save_tiny("gpt2", tmp_path)
    with pytest.raises(ValueError, match=r"4096 tokens long, but the model has positions for 512.*--max-model-len 512"):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, hf_overrides={"max_position_embeddings": 4096})


def test_windows_of_qwen_with_experts():
    keys = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert configured("Qwen2Moe", **keys).windows == (64, None, None, None)
    assert configured("Qwen3Moe", **keys).windows == (64,) * 4


@pytest.mark.parametrize("architecture", ["Mixtral", "Olmoe", "GptOss", "Cohere", "Cohere2", "Qwen3Moe", "GraniteMoe"])
def test_config_defaults_equal_those_of_transformers(architecture):
    import transformers

    theirs = getattr(transformers, f"{architecture}Config")()
    ours = configured(architecture)
    rope = next(rope for rope in ours.ropes if rope is not None)
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm_eps == getattr(theirs, "layer_norm_eps", None) or theirs.rms_norm_eps


def test_a_missing_key_is_named():
    hf = {key: value for key, value in COMMON.items() if key != "num_hidden_layers"}
    with pytest.raises(ValueError, match="the model's config lacks num_hidden_layers"):
        model_class({"architectures": ["MistralForCausalLM"]})(hf, ModelOptions(torch.float32, CPU))
    with pytest.raises(ValueError, match="num_hidden_layers is '4'; it must be a whole number"):
        model_class({"architectures": ["LlamaForCausalLM"]})(
            COMMON | {"num_hidden_layers": "4"}, ModelOptions(torch.float32, CPU)
        )
