from types import SimpleNamespace

import pytest
import torch

from quire.attention.selector import cache_dtype, choose_backend
from quire.kernels import native
from quire.kernels.paged_attention import AttentionShape
from quire.platforms import current_platform

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64)
ROWS = 8
GPU = SimpleNamespace(name="cuda", supports_triton=True, supports_native=False)


def test_selector_says_why_and_lists_what_is_allowed():
    cpu = current_platform("cpu")
    backend, reason = choose_backend(cpu, torch.float16, [SHAPE], ROWS)
    assert backend.name == "torch" and "float16" in reason
    backend, reason = choose_backend(cpu, torch.bfloat16, [SHAPE], ROWS)
    assert backend.name == ("torch" if native.library() is None else "native") and "bfloat16" in reason
    backend, reason = choose_backend(cpu, torch.bfloat16, [SHAPE], ROWS, "torch")
    assert backend.name == "torch" and "requested" in reason
    for asked, dtype, message in (
        ("flash", torch.bfloat16, "'flash'; allowed: torch, native, triton"),
        ("triton", torch.bfloat16, "needs a GPU"),
        ("native", torch.float16, "float32 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_backend(cpu, dtype, [SHAPE], ROWS, asked)
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8' needs a GPU; allowed on a CPU: auto"):
        cache_dtype(cpu, torch.bfloat16, "fp8")


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(("heads", "head_size"), [(4, 320), (200, 64)])
def test_shapes_that_the_c_kernels_do_not_support(heads, head_size):
    cpu, shapes = current_platform("cpu"), [SHAPE, AttentionShape(heads, 1, head_size)]
    backend, reason = choose_backend(cpu, torch.bfloat16, shapes, ROWS)
    assert backend.name == "torch" and "native needs heads of at most 256" in reason
    with pytest.raises(ValueError, match="at most 192 of them to a KV head; allowed here: torch"):
        choose_backend(cpu, torch.bfloat16, shapes, ROWS, "native")


@pytest.mark.parametrize(("heads", "head_size"), [(4, 320), (200, 64)])
def test_shapes_that_the_gpu_kernels_do_not_support(heads, head_size):
    with pytest.raises(ValueError, match="the most are 256 and 128; allowed here: torch"):
        shapes = [SHAPE, AttentionShape(heads, 1, head_size)]
        choose_backend(GPU, torch.bfloat16, shapes, ROWS)


def test_more_rows_than_a_launch_grid_allows():
    with pytest.raises(ValueError, match=r"max_num_seqs is 65536; on a GPU at most 65535 .*--max-num-seqs"):
        choose_backend(GPU, torch.bfloat16, [SHAPE], 65_536)
