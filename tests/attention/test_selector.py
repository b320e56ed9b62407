from types import SimpleNamespace

import pytest
import torch

from quire.attention.selector import AttentionShape, cache_dtype, choose_backend
from quire.kernels import native
from quire.platforms import current_platform

SHAPE = AttentionShape(max_rows=8, num_heads=4, num_kv_heads=2, head_size=64)


def test_selector_says_why_and_lists_what_is_allowed():
    cpu = current_platform("cpu")
    backend, reason = choose_backend(cpu, torch.float16, SHAPE)
    assert backend.name == "torch" and "float16" in reason
    backend, reason = choose_backend(cpu, torch.bfloat16, SHAPE)
    assert backend.name == ("torch" if native.library() is None else "native") and "bfloat16" in reason
    backend, reason = choose_backend(cpu, torch.bfloat16, SHAPE, "torch")
    assert backend.name == "torch" and "asked for" in reason
    for asked, dtype, message in (
        ("flash", torch.bfloat16, "'flash'; allowed: torch, native, triton"),
        ("triton", torch.bfloat16, "needs a GPU"),
        ("native", torch.float16, "float32 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_backend(cpu, dtype, SHAPE, asked)
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8' needs a GPU; allowed on a CPU: auto"):
        cache_dtype(cpu, torch.bfloat16, "fp8")


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(("heads", "head_size"), [(4, 320), (200, 64)])
def test_shapes_that_the_c_kernels_have_not(heads, head_size):
    cpu, shape = current_platform("cpu"), AttentionShape(8, heads, 1, head_size)
    backend, reason = choose_backend(cpu, torch.bfloat16, shape)
    assert backend.name == "torch" and "native needs heads of at most 256" in reason
    with pytest.raises(ValueError, match="at most 192 of them to a KV head; allowed here: torch"):
        choose_backend(cpu, torch.bfloat16, shape, "native")


@pytest.mark.parametrize(("heads", "head_size"), [(4, 320), (200, 64)])
def test_shapes_that_the_gpu_kernels_have_not(heads, head_size):
    with pytest.raises(ValueError, match="the most are 256 and 128; allowed here: torch"):
        choose_backend(SimpleNamespace(name="cuda"), torch.bfloat16, AttentionShape(8, heads, 1, head_size))
