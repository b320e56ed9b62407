"""The MoE layer: against a float64 reference, transformers' own formulas, and itself split among workers."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels import native
from quire.kernels.moe import ExpertWeights, experts_torch, route
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import (
    BUCKETS,
    FLOAT32,
    MEASURED,
    FewConfig,
    GroupedConfig,
    SlabConfig,
    choose,
    choose_few,
    tile_heights,
)
from quire.kernels.native import moe as native_moe
from quire.kernels.native.build import library
from quire.kernels.native.replay import Recording
from quire.layers.fused_moe import FusedMoE
from quire.layers.load_slot import all_load_slots
from quire.layers.moe_backend import choose_moe_backend
from quire.layers.parallel import TensorParallel

CPU = torch.device("cpu")
needs_c = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are so small that threads cost more than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Pretended(TensorParallel):
    """A worker whose partial sums are added up by the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def brute_force(x, logits, gate_up, down, gate_up_bias, down_bias, top_k, activation):
    """Row by row, expert by expert, in float64."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    out = torch.zeros_like(x)
    for row in range(len(x)):
        chosen = sorted(range(logits.shape[1]), key=lambda e: (-float(logits[row, e]), e))[:top_k]
        shares = torch.exp(logits[row, chosen].double() - logits[row, chosen[0]].double())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            both = gate_up[e] @ x[row] + (0 if gate_up_bias is None else gate_up_bias[e].double())
            gate, up = both[: len(both) // 2], both[len(both) // 2 :]
            if activation == "silu":
                inner = gate / (1 + torch.exp(-gate)) * up
            else:
                gate = torch.clamp(gate, max=7)
                inner = (torch.clamp(up, -7, 7) + 1) * gate / (1 + torch.exp(-1.702 * gate))
            out[row] += share * (down[e] @ inner + (0 if down_bias is None else down_bias[e].double()))
    return out


def make(num_experts=6, top_k=3, hidden=48, width=40, dtype=torch.float32, tp=None, tensors=None, routing=None, **kind):
    """A layer and the checkpoint's tensors that it was filled with, all workers' together."""
    torch.manual_seed(0)
    layer = FusedMoE(num_experts, routing or Routing(top_k), hidden, width, dtype, CPU, tp or TensorParallel(), **kind)
    if tensors is None:
        tensors = {
            key: (torch.randn(slot.full_shape) * 0.3).to(dtype).float() for key, slot in layer.load_slots().items()
        }
    for key, slot in layer.load_slots().items():
        slot.view.copy_(slot.part_of(tensors[key]))
    layer.process_after_loading()
    return layer, tensors


def whole(tensors, num_experts):
    """gate_up, down and biases, whichever way the checkpoint stores them."""
    if ("gate_up", None) in tensors:
        return [tensors.get((name, None)) for name in ("gate_up", "down", "gate_up_bias", "down_bias")]
    gate_up = [torch.cat([tensors[f"gate_up.{e}.weight", half] for half in (0, 1)]) for e in range(num_experts)]
    down = [tensors[f"down.{e}.weight", None] for e in range(num_experts)]
    return [torch.stack(gate_up), torch.stack(down), None, None]


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize(("checkpoint", "bias"), [("per_expert", False), ("fused", False), ("fused", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_float64_reference(dtype, checkpoint, bias, activation):
    layer, tensors = make(dtype=dtype, activation=activation, checkpoint=checkpoint, bias=bias)
    x, logits = torch.randn(9, 48).to(dtype), torch.randn(9, 6).to(dtype)
    wanted = brute_force(x, logits, *whole(tensors, 6), 3, activation)
    limits = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(layer(x, logits).double(), wanted, **limits)


def test_no_rows():
    for dtype in (torch.float32, torch.bfloat16):
        assert make(dtype=dtype)[0](torch.empty(0, 48, dtype=dtype), torch.empty(0, 6, dtype=dtype)).shape == (0, 48)


@pytest.mark.parametrize("num_experts", [8, 60])
def test_routing_of_transformers(num_experts):
    logits = torch.randn(33, num_experts)
    values, experts = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), 4, dim=-1)  # OLMoE
    got = route(logits, Routing(4, renormalize=False))
    assert torch.equal(got[1].long(), experts)
    torch.testing.assert_close(got[0], values)
    values = values / values.sum(dim=-1, keepdim=True)  # Mixtral, Qwen3-MoE
    torch.testing.assert_close(route(logits, Routing(4))[0], values)
    chosen, experts = logits.topk(4, dim=1)  # Granite, gpt-oss
    got = route(logits, Routing(4, "topk_softmax"))
    assert torch.equal(got[1].long(), experts)
    torch.testing.assert_close(got[0], torch.softmax(chosen, dim=1).float())


def test_a_layer_of_transformers():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=32, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2)
    theirs = MixtralSparseMoeBlock(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    gate_up, down = theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data
    tensors = {("gate_up", None): gate_up, ("down", None): down}
    ours, _ = make(5, 2, 32, 24, tensors=tensors, checkpoint="fused")
    x = torch.randn(1, 11, 32)
    with torch.no_grad():
        wanted = theirs(x)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    logits = F.linear(x[0], theirs.gate.weight.data)
    torch.testing.assert_close(ours(x[0], logits), wanted[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scores", ["softmax", "topk_softmax"])
def test_equal_logits_take_the_lower_expert(scores):
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 1.0]])
    assert route(logits, Routing(4, scores))[1].tolist() == [[1, 2, 4, 0]]
    if native.library() is not None:
        assert native_moe.route(logits, Routing(4, scores))[1].tolist() == [[1, 2, 4, 0]]


@needs_c
@pytest.mark.parametrize("of_chosen", [False, True])
def test_routing_in_c(of_chosen):
    routing = Routing(8, renormalize=of_chosen)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randint(-8, 8, (40, 100)) / 4).to(dtype)
        wanted = route(logits, routing)
        got = native_moe.route(logits, routing)
        assert torch.equal(got[1], wanted[1])
        torch.testing.assert_close(got[0], wanted[0])
    garbage = torch.full((1, 5), float("nan"))
    assert native_moe.route(garbage, Routing(3))[1].tolist() == [[0, 1, 2]]


@needs_c
@pytest.mark.parametrize("of_chosen", [False, True])
def test_a_nan_logit_makes_its_row_nan_in_c(of_chosen):
    routing = Routing(3, renormalize=of_chosen)
    logits = torch.randn(3, 10)
    logits[1, 4] = float("nan")
    weights, experts = native_moe.route(logits, routing)
    wanted = route(logits, routing)
    torch.testing.assert_close(weights, wanted[0], equal_nan=True)
    assert weights[1].isnan().all() and experts[[0, 2]].equal(wanted[1][[0, 2]]) and experts[1, 0] == 4
    packed = [native_moe.pack_experts(weight) for weight in experts_of(10, 32, 16, False)[:2]]
    made = native_moe.moe(
        torch.randn(3, 32).bfloat16(), weights, experts, native_moe.PackedExperts(*packed, None, None, "silu", 32, 16)
    )
    assert made.isnan().all(1).tolist() == [False, True, False]


def experts_of(num_experts, hidden, width, bias):
    shapes = [(num_experts, 2 * width, hidden), (num_experts, hidden, width), (num_experts, 2 * width)]
    gate_up, down, *biases = (torch.randn(*shape) * 0.2 for shape in [*shapes, (num_experts, hidden)])
    return [t.bfloat16() for t in (gate_up, down)] + [b.bfloat16() if bias else None for b in biases]


def check_native(run, rows, top_k, hidden, width, idle, bias):
    torch.manual_seed(rows)
    parts = experts_of(10, hidden, width, bias)
    activation = "swigluoai" if bias else "silu"
    x, logits = torch.randn(rows, hidden).bfloat16(), torch.randn(rows, 10)
    logits[:, :idle] = -9.0
    routes = route(logits, Routing(top_k))
    packed = [native_moe.pack_experts(weight) for weight in parts[:2]]
    got = run(x, *routes, native_moe.PackedExperts(*packed, *parts[2:], activation, hidden, width))
    wide = ExpertWeights(*(None if p is None else p.float() for p in parts), activation=activation)
    torch.testing.assert_close(got.float(), experts_torch(x.float(), *routes, wide), atol=0.05, rtol=0.05)


@needs_c
@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (100, 37), (67, 96)])
@pytest.mark.parametrize(("rows", "top_k", "idle"), [(1, 3, 0), (7, 2, 4), (50, 1, 9), (130, 4, 0)])
def test_native(rows, top_k, idle, hidden, width):
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        check_native(native_moe.moe, rows, top_k, hidden, width, idle, bias=rows % 2 == 0)


@needs_c
def test_more_rows_than_go_at_once(monkeypatch):
    monkeypatch.setattr(native_moe, "MAX_ROWS", 16)
    check_native(native_moe.moe, 50, 3, 64, 32, 0, bias=True)


@needs_c
@pytest.mark.parametrize("flag", ["-DQUIRE_EMULATE_AMX", "-march=x86-64"])
def test_other_processors(flag, monkeypatch):
    """The tiles of AMX in software, and bf16 widened."""
    other = library(flag, only=("moe.c", "amx.c", "linear.c", "threads.c"))
    function = other.quire_moe
    function.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int64] * 5 + [ctypes.c_int] * 2
    amx = "AMX" in flag
    if amx:
        assert other.quire_amx_start() == native.AMX_STATES.index("works")
    monkeypatch.setattr(native_moe, "has_amx", lambda: amx)
    monkeypatch.setattr(native_moe, "native_function", lambda name: function if name == "quire_moe" else None)

    def run(x, weights, experts, packed):
        return native_moe.moe(x, weights, experts, packed)

    monkeypatch.setattr(native_moe, "pack_experts", lambda w: torch.stack([native.pack_linear(e) for e in w]))
    for rows, top_k, hidden, width in ((1, 3, 64, 32), (70, 4, 67, 50)):
        check_native(run, rows, top_k, hidden, width, 0, bias=rows > 1)


@needs_c
def test_weights_are_packed_and_the_originals_freed():
    layer, _ = make(dtype=torch.bfloat16)
    assert layer.backend.name == "native" and not list(layer.parameters())


@needs_c
def test_a_recorded_step_is_replayed_with_other_experts():
    routing, bias = Routing(2, "sigmoid", groups=3, top_groups=2, group_score="top2_sum"), torch.randn(6)
    layer, _ = make(dtype=torch.bfloat16, routing=routing)
    x, logits = torch.randn(2, 48).bfloat16(), torch.randn(2, 6).bfloat16()
    layer(x, logits, bias)  # kinds of kernels are chosen at the first call
    with Recording(2) as recording:
        out = layer(x, logits, bias)
    x.copy_(torch.randn(2, 48)), logits.copy_(torch.randn(2, 6))
    wanted = layer(x, logits, bias)
    recording.replayed()(2, 2, 0)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("checkpoint", "bias"), [("per_expert", False), ("fused", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workers_sum_up_to_the_whole(dtype, checkpoint, bias):
    layer, tensors = make(dtype=dtype, checkpoint=checkpoint, bias=bias)
    x, logits = torch.randn(5, 48).to(dtype), torch.randn(5, 6).to(dtype)
    parts = [
        make(dtype=dtype, checkpoint=checkpoint, bias=bias, tp=Pretended(rank, 2), tensors=tensors)[0](x, logits)
        for rank in (0, 1)
    ]
    limits = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(parts[0] + parts[1], layer(x, logits), **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", [1, 2])
def test_shared_experts_are_an_mlp_of_their_widths_together(workers, dtype):
    torch.manual_seed(0)
    routing, bias = Routing(2, "sigmoid", scale=2.5), torch.randn(6)
    up = {half: torch.randn(80, 48) * 0.3 for half in (0, 1)}
    down = torch.randn(48, 80) * 0.3
    x, logits = torch.randn(5, 48).to(dtype), torch.randn(5, 6).to(dtype)
    plain, tensors = make(dtype=dtype, routing=routing)
    total = torch.zeros(5, 48)
    for rank in range(workers):
        layer = FusedMoE(6, routing.with_shared(2), 48, 40, dtype, CPU, Pretended(rank, workers))
        for key, slot in layer.load_slots().items():
            slot.view.copy_(slot.part_of(tensors[key]))
        for (name, half), slot in layer.shared_slots().items():
            with slot.opened() as view:
                view.copy_(slot.part_of(down if name.startswith("down") else up[half]))
        layer.process_after_loading()
        total += layer(x, logits, bias).float()
    own = F.linear(F.silu(F.linear(x.float(), up[0])) * F.linear(x.float(), up[1]), down)
    limits = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.2, "rtol": 0.05}
    torch.testing.assert_close(total, plain(x, logits, bias).float() + own, **limits)


def test_slots_cover_the_weights():
    layer = FusedMoE(4, Routing(2), 8, 6, torch.float32, CPU)
    layer.gate_up.data.zero_(), layer.down.data.zero_()
    slots = layer.load_slots()
    assert slots["gate_up.3.weight", 1].full_shape == (6, 8) and slots["down.3.weight", None].full_shape == (8, 6)
    assert len(slots) == 12
    for slot in slots.values():
        slot.view.add_(1)
    assert (layer.gate_up == 1).all() and (layer.down == 1).all()


def test_random_weights_fill_whole_tensors():
    model = nn.ModuleDict({"experts": FusedMoE(4, Routing(2), 8, 6, torch.float32, CPU, bias=True, checkpoint="fused")})
    slots = all_load_slots(model, dummy=True)
    assert {name: slot.dummy for (name, _), slot in slots.items()} == {
        "experts.gate_up": "normal",
        "experts.down": "normal",
        "experts.gate_up_bias": "zeros",
        "experts.down_bias": "zeros",
    }


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="top_k is 5, but there are 4 experts"):
        FusedMoE(4, Routing(5), 8, 6, torch.float32, CPU)
    with pytest.raises(ValueError, match="intermediate size \\(6\\)"):
        FusedMoE(4, Routing(2), 8, 6, torch.float32, CPU, TensorParallel(0, 4))


def test_biases_of_single_experts_are_split_among_workers():
    for rank in range(2):
        layer = FusedMoE(4, Routing(2), 8, 6, torch.float32, CPU, TensorParallel(rank, 2), bias=True)
        slots = layer.load_slots()
        for shard in (0, 1):
            slot = slots["gate_up.3.bias", shard]
            slot.view.copy_(slot.part_of(torch.arange(6.0) + 10 * shard))
        slots["down.3.bias", None].view.copy_(torch.arange(8.0))
        first = [0.0, 1.0, 2.0] if rank == 0 else [3.0, 4.0, 5.0]
        assert layer.gate_up_bias[3].tolist() == [*first, *(10 + each for each in first)]
        assert layer.down_bias[3].tolist() == list(range(8))


def test_backends():
    assert choose_moe_backend("cuda", torch.bfloat16, 128).name == "triton"
    assert choose_moe_backend("cuda", torch.float32, 2000).name == "torch"
    slow = choose_moe_backend("cpu", torch.float32, 8)
    assert slow.name == "torch" and "bfloat16, not float32" in slow.why
    assert choose_moe_backend("cpu", torch.bfloat16, 8, "torch").why == "it was requested"
    with pytest.raises(ValueError, match="triton cannot be used: Triton needs a GPU"):
        choose_moe_backend("cpu", torch.bfloat16, 8, "triton")
    with pytest.raises(ValueError, match="must be one of auto, triton, native, torch"):
        choose_moe_backend("cpu", torch.bfloat16, 8, "cutlass")


QWEN3 = (128, 8, 2048, 768)
SHAPES = [QWEN3, (8, 2, 4096, 14336), (64, 8, 2048, 1024), (32, 4, 2880, 2880), (60, 4, 2048, 1408), (40, 8, 1536, 512)]


@pytest.mark.parametrize("shape", SHAPES)
def test_there_is_a_kernel_for_any_number_of_rows(shape):
    for rows in (*BUCKETS, 3, 100, 50000):
        config = choose(rows, shape)
        if isinstance(config, FewConfig):
            assert rows * shape[1] <= 64
        else:
            assert config.block_m in tile_heights(rows, shape) and config.block_m >= 16
        assert rows * shape[1] <= 64 or choose(rows, shape, itemsize=4) is FLOAT32
    assert isinstance(choose_few(16, shape), FewConfig)


def test_a_measured_model_takes_the_measured_kernel(monkeypatch):
    few = FewConfig(SlabConfig(2, 2048), SlabConfig(2, 256))
    many = choose(64, QWEN3)
    assert isinstance(many, GroupedConfig)
    monkeypatch.setitem(MEASURED, (16, *QWEN3), few)
    monkeypatch.setitem(MEASURED, (8, *QWEN3), many)
    assert choose(9, QWEN3) == choose_few(16, QWEN3) == few and choose(5, QWEN3) == many
    assert isinstance(choose_few(5, QWEN3), FewConfig)
