"""Triton MoE kernels against their torch references, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.moe import (
    ExpertWeights,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
    route,
)
from quire.kernels.moe_routing import Routing, route_torch
from quire.kernels.moe_table import FLOAT32, FewConfig, GroupedConfig, MoeConfig, SlabConfig, TileConfig
from quire.kernels.triton.moe_grouped import max_tiles
from quire.kernels.triton.moe_route import RouteWorkspace
from tests.kernels.routings import ROUTINGS, bias_of, rows_with_anything, rows_with_ties

torch.set_num_threads(1)  # tensors are tiny
E, TOP_K, H, WIDTH = 6, 3, 80, 40  # no multiples of any tile
CONFIGS: dict[str, MoeConfig] = {
    "few, one step": FewConfig(SlabConfig(16, 128), SlabConfig(8, 64)),
    "few, loop": FewConfig(SlabConfig(32, 16), SlabConfig(32, 8)),
    "few, ragged loop": FewConfig(SlabConfig(16, 64), SlabConfig(16, 32)),
    "grouped": GroupedConfig(16, TileConfig(32, 16, stages=2, tma=False), TileConfig(32, 16, stages=2, tma=False)),
    "grouped, tma": GroupedConfig(16, TileConfig(16, 32), TileConfig(64, 16)),
    "grouped, high tiles": GroupedConfig(32, TileConfig(16, 64, tma=False), TileConfig(16, 32)),
}
ROUTING = Routing(TOP_K)
PLAIN = [{}, {"renormalize": False}, {"scores": "topk_softmax"}]


def tensor(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.5).half()  # the interpreter multiplies matrices in float16, but not in bfloat16


def expert_weights(bias: bool = False, activation: str = "silu") -> ExpertWeights:
    biases = (tensor(E, 2 * WIDTH), tensor(E, H)) if bias else (None, None)
    return ExpertWeights(tensor(E, 2 * WIDTH, H) * 0.3, tensor(E, H, WIDTH) * 0.3, *biases, activation=activation)


def check(x, logits, w, config, routing=ROUTING, bias=None):
    residual = tensor(*x.shape)
    routes = route_torch(logits, routing, bias)
    got = moe_triton(x, logits, w, routing, bias, residual=residual, config=config)
    torch.testing.assert_close(got, experts_torch(x, *routes, w, residual), atol=2e-2, rtol=2e-2)
    assert not RouteWorkspace.of(x.device).counts.any()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 3), (8, 8), (100, 8), (32, 1)])
def test_route(num_experts, top_k, kind):
    logits = torch.randint(-6, 6, (5, num_experts)).half() / 2  # with ties
    got, wanted = (how(logits, Routing(top_k, **kind)) for how in (route, route_torch))
    assert torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0])


@pytest.mark.parametrize("rows", [rows_with_ties, rows_with_anything])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name, rows):
    count, routing, has_bias = ROUTINGS[name]
    logits, bias = rows(count), bias_of(count, has_bias)
    got, wanted = route(logits, routing, bias), route_torch(logits, routing, bias)
    assert torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0], equal_nan=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7])
def test_shared_experts_among_the_others(name, rows):
    routing = Routing(2, "sigmoid", scale=2.5, groups=2, group_score="top2_sum", shared=2)
    check(tensor(rows, H), tensor(rows, E - 2), expert_weights(), CONFIGS[name], routing, torch.randn(E - 2))


@pytest.mark.parametrize("name", [name for name in CONFIGS if "few" in name])
def test_a_whole_layer_with_a_bias_of_the_choice(name):
    routing = Routing(2, "sigmoid", epsilon=1e-20, scale=2.5, groups=2, group_score="top2_sum", shared=2)
    x, gain, router = tensor(3, H), torch.rand(H) + 0.5, tensor(E - 2, H)
    layer = ((gain, 1e-5), router, None, expert_weights(), routing, torch.randn(E - 2))
    wanted = fused_layer_torch(x, *layer, residual=x)
    got = fused_layer(x, *layer, residual=x, config=CONFIGS[name])
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_rows_of_nan_or_inf_get_valid_experts():
    logits = torch.full((3, E), float("nan"))
    logits[1, 2], logits[2] = float("inf"), float("-inf")
    _, experts = route(logits, ROUTING)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_nan_logit_makes_its_row_nan_and_no_other(kind):
    routing = Routing(TOP_K, **kind)
    x, logits, w = tensor(3, H), tensor(3, E), expert_weights()
    logits[1, 4] = float("nan")
    got, wanted = route(logits, routing), route_torch(logits, routing)
    torch.testing.assert_close(got[0], wanted[0], equal_nan=True)
    assert got[1][[0, 2]].equal(wanted[1][[0, 2]]) and got[1][1, 0] == wanted[1][1, 0] == 4
    for config in (CONFIGS["few, one step"], CONFIGS["grouped"]):
        out = moe_triton(x, logits, w, routing, config=config)
        assert out.isnan().all(1).tolist() == [False, True, False] and not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7])
def test_rows(name, rows):
    wide = tensor(rows, 2 * H)
    check(wide[:, :H], tensor(rows, E), expert_weights(), CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_bias_and_another_activation(name):
    w = expert_weights(bias=True, activation="swigluoai")
    check(tensor(5, H) * 6, tensor(5, E), w, CONFIGS[name], Routing(TOP_K, "topk_softmax"))


@pytest.mark.parametrize("name", [name for name in CONFIGS if "grouped" in name])
@pytest.mark.parametrize("distribution", ["some idle", "all to the same"])
def test_distributions(name, distribution):
    logits = tensor(23, E)
    if distribution == "some idle":
        logits[:, [0, 4]] = -9
    if distribution == "all to the same":
        logits[:, [1, 3, 5]] = 9
    check(tensor(23, H), logits, expert_weights(), CONFIGS[name])


def test_float32():
    for config in (CONFIGS["few, one step"], FLOAT32):
        x, logits, w = tensor(9, H).float(), tensor(9, E).float(), expert_weights()
        w = ExpertWeights(w.gate_up.float(), w.down.float())
        wanted = experts_torch(x, *route_torch(logits, ROUTING), w)
        torch.testing.assert_close(moe_triton(x, logits, w, ROUTING, config=config), wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [name for name in CONFIGS if "few" in name])
def test_a_whole_layer(name, bias):
    x, gain = tensor(3, H), torch.rand(H) + 0.5
    router, router_bias = tensor(E, H), tensor(E) if bias else None
    layer = ((gain, 1e-5), router, router_bias, expert_weights(bias), ROUTING)
    wanted = fused_layer_torch(x, *layer, residual=x)
    got = fused_layer(x, *layer, residual=x, config=CONFIGS[name])
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    assert not RouteWorkspace.of(x.device).arrived.any()


def test_there_are_tiles_for_every_distribution():
    for pairs in range(1, 40):
        for block_m in (4, 16):
            # The worst: all experts but one with a single pair.
            worst = max(used - 1 + -(-(pairs - used + 1) // block_m) for used in range(1, min(pairs, E) + 1))
            assert max_tiles(pairs, E, block_m) == worst
