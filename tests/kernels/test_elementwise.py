import torch
import torch.nn.functional as F

from quire.kernels.kv_write import cache_rows, kv_write
from quire.kernels.rms_norm import fused_add_rms_norm, rms_norm
from quire.kernels.rope import apply_rope, gather_cos_sin
from quire.kernels.silu_mul import silu_mul


def test_rms_norm_is_exact_in_float32():
    x, weight = torch.randn(5, 24), torch.randn(24)
    wanted = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), wanted, atol=1e-6, rtol=1e-6)
    normed, total = fused_add_rms_norm(x, x.clone(), weight, 1e-5)
    assert torch.equal(total, x + x)
    assert torch.equal(normed, rms_norm(x + x, weight, 1e-5))


def test_silu_mul():
    x = torch.randn(3, 10)
    torch.testing.assert_close(silu_mul(x), F.silu(x[:, :5]) * x[:, 5:])


def test_partial_rope_turns_pairs_and_leaves_the_rest():
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1])
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    x, positions = torch.randn(3, 2, 7), torch.tensor([0, 5, 2])
    out = apply_rope(x, *gather_cos_sin(cache, positions))
    assert torch.equal(out[..., 4:], x[..., 4:])
    torch.testing.assert_close(out[0], x[0])
    turned = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones(3, 2), angles[positions]).unsqueeze(1)
    torch.testing.assert_close(out[..., :4], torch.cat((turned.real, turned.imag), dim=-1))


def test_kv_write_touches_its_slots_only():
    cache = torch.zeros(4, 2, 3, 8, 5)
    k, v, slots = torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.tensor([2 * 8 + 7, 3 * 8])
    kv_write(k, v, cache, cache_rows(slots, 3, 8))
    assert torch.equal(cache[2, 0, :, 7], k[0]) and torch.equal(cache[3, 1, :, 0], v[1])
    assert int((cache != 0).sum()) == 2 * 2 * 3 * 5
