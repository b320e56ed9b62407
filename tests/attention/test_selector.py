from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire.attention import selector
from quire.attention.base import CacheBackend, GroupFeatures
from quire.attention.cache_format import cache_format, checkpoint_scheme
from quire.attention.selector import choose_backends, register_backend
from quire.kernels import native
from quire.kernels.paged_attention import AttentionShape
from quire.messages.kv_cache import FullAttentionSpec, LatentSpec, SlidingWindowSpec, StateSpec
from quire.platforms import current_platform

CPU = current_platform("cpu")
GPU = SimpleNamespace(name="cuda", supports_triton=True, supports_native=False)
FEATURES = GroupFeatures((AttentionShape(num_heads=4, num_kv_heads=2, head_size=64),), max_rows=8)
LATENT = LatentSpec(16, 32, 8, "bfloat16")


def full(dtype=torch.bfloat16, **fields):
    return FullAttentionSpec(16, 2, 64, str(dtype).removeprefix("torch."), **fields)


def built_in():
    """Without those that other tests have registered."""
    return [backend for backend in selector.BACKENDS if backend.__module__.startswith("quire.")]


@pytest.fixture(autouse=True)
def only_built_in(monkeypatch):
    monkeypatch.setattr(selector, "BACKENDS", built_in())


def choose(platform, dtype, requested=None, spec=None, **features):
    """Of a single group: the backend's name and the reason."""
    pairs = [(spec or full(dtype), replace(FEATURES, **features))]
    choice = choose_backends(platform, dtype, pairs, requested)
    return choice.by_group[0].name, choice.reasons[0]


def test_selector_says_why_and_lists_what_is_allowed():
    name, reason = choose(CPU, torch.float16)
    assert name == "torch" and "float16" in reason and "triton needs a GPU; native needs float32 or bfloat16" in reason
    name, reason = choose(CPU, torch.bfloat16)
    assert name == ("torch" if native.library() is None else "native") and "bfloat16" in reason
    name, reason = choose(CPU, torch.bfloat16, "torch")
    assert name == "torch" and "requested" in reason
    for asked, dtype, message in (
        ("flash", torch.bfloat16, "'flash'; allowed: triton, native, torch"),
        ("triton", torch.bfloat16, r"needs a GPU; allowed here: .*torch"),
        ("native", torch.float16, "float32 or bfloat16; allowed here: torch"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(CPU, dtype, asked)
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8' needs a GPU; allowed on a CPU: auto"):
        cache_format(CPU, torch.bfloat16, "fp8")
    with pytest.raises(ValueError, match="'torch' needs a cache of bfloat16, not float8_e4m3fn"):
        choose(GPU, torch.bfloat16, "torch", full(torch.float8_e4m3fn))


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_float32_is_served_by_the_c_kernels_only_on_request():
    name, reason = choose(CPU, torch.float32)
    assert name == "torch" and "native was not chosen: in float32" in reason
    assert choose(CPU, torch.float32, "native")[0] == "native"


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(("heads", "head_size"), [(4, 320), (200, 64)])
def test_shapes_that_the_c_kernels_do_not_support(heads, head_size):
    shapes = (*FEATURES.shapes, AttentionShape(heads, 1, head_size))
    name, reason = choose(CPU, torch.bfloat16, shapes=shapes)
    assert name == "torch" and "native needs heads of at most 256" in reason
    with pytest.raises(ValueError, match="at most 192 of them to a KV head; allowed here: torch"):
        choose(CPU, torch.bfloat16, "native", shapes=shapes)


@pytest.mark.parametrize(("heads", "head_size"), [(4, 320), (200, 64)])
def test_shapes_that_the_gpu_kernels_do_not_support(heads, head_size):
    with pytest.raises(ValueError, match=r"the most are 256 and 128; .*allowed here: torch"):
        choose(GPU, torch.bfloat16, shapes=(*FEATURES.shapes, AttentionShape(heads, 1, head_size)))


def test_more_rows_than_a_launch_grid_allows():
    with pytest.raises(ValueError, match=r"max_num_seqs is 65536; on a GPU at most 65535 .*--max-num-seqs"):
        choose(GPU, torch.bfloat16, max_rows=65_536)


@pytest.mark.parametrize("platform", [CPU, GPU])
@pytest.mark.parametrize(
    ("features", "missing"), [({"causal": False}, "causal"), ({"padded": True}, "without padding")]
)
def test_what_only_torch_serves(platform, features, missing):
    name, reason = choose(platform, torch.bfloat16, **features)
    assert name == "torch" and (native.library() is None or missing in reason)


def test_a_checkpoint_chooses_fp8_where_the_device_has_it(caplog):
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    configs = [
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}},
        {"quantization_config": {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
    ]
    gpu = SimpleNamespace(check_fp8_cache=lambda name: None)
    for config in configs:
        assert cache_format(gpu, torch.bfloat16, "auto", config).dtype is torch.float8_e4m3fn
        assert cache_format(gpu, torch.bfloat16, "bfloat16", config).dtype is torch.bfloat16
        assert cache_format(CPU, torch.bfloat16, "auto", config).dtype is torch.bfloat16
    for config in ({}, {"quantization_config": {"quant_method": "fp8"}}):
        assert cache_format(gpu, torch.bfloat16, "auto", config).dtype is torch.bfloat16
    per_head = {"quantization_config": {"kv_cache_scheme": scheme | {"strategy": "attn_head"}}}
    assert "attn_head" in checkpoint_scheme(per_head)
    assert cache_format(gpu, torch.bfloat16, "auto", per_head).dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"'float16', but the model is in bfloat16; allowed: auto, bfloat16, fp8"):
        cache_format(gpu, torch.bfloat16, "float16")


def test_who_serves_a_cache_with_a_scale_per_token_and_head():
    int8, fp8 = (full(dtype, scale_dtype="float32") for dtype in (torch.int8, torch.float8_e4m3fn))
    for spec in (int8, fp8):
        assert selector.TritonEntry.supports(GPU, torch.bfloat16, spec, FEATURES) is None
    assert choose(CPU, torch.float16, spec=int8)[0] == "torch"
    assert choose(CPU, torch.bfloat16, spec=int8)[0] == ("torch" if native.library() is None else "native")


def test_bidirectional_windows_are_served_by_none():
    window = SlidingWindowSpec(16, 2, 64, "bfloat16", sliding_window=8)
    with pytest.raises(ValueError, match="torch needs causal attention where there is a window"):
        choose(CPU, torch.bfloat16, spec=window, causal=False)


def test_latents_on_a_gpu():
    assert choose(GPU, torch.bfloat16, spec=LATENT)[0] == "triton_mla"
    with pytest.raises(ValueError, match=r"at most 512 \+ 64, not 1024 \+ 64.*allowed here: torch_mla"):
        choose(GPU, torch.bfloat16, spec=replace(LATENT, rank=1024, rope_size=64))


def test_a_registered_backend_serves_its_kind_and_groups_share_backends(monkeypatch):
    with pytest.raises(ValueError, match=r"kind StateSpec here: .*torch needs a cache of kind FullAttentionSpec"):
        choose(CPU, torch.float16, spec=StateSpec(16, ()))

    class Latent(CacheBackend):
        name = "latent"
        kinds = (LatentSpec,)

        @classmethod
        def create(cls, platform, dtype, features):
            backend = cls()
            backend.shapes = features.shapes
            return backend

    register_backend(Latent)
    other = replace(FEATURES, shapes=(AttentionShape(2, 1, 40),))
    groups = [(full(torch.float16), FEATURES), (LATENT, other), (full(torch.float16), other), (LATENT, FEATURES)]
    # What is requested does not know the kind of the others.
    choice = choose_backends(CPU, torch.float16, groups, requested="torch")
    assert [backend.name for backend in choice.by_group] == ["torch", "latent", "torch", "latent"]
    assert choice.by_group[1] is choice.by_group[3] and len(choice.reasons) == 3
    assert choice.by_group[1].shapes == other.shapes + FEATURES.shapes
