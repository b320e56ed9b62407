"""Routing: as transformers computes it, the same in C, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels import native
from quire.kernels.moe_routing import Routing, route_torch
from quire.kernels.native import moe as native_moe
from tests.kernels.routings import INF, NAN, ROUTINGS, bias_of, rows_with_anything, rows_with_ties


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def by_expert(weights: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(len(weights), count).scatter_(1, experts.long(), weights)


def transformers_router(name: str, count: int, routing: Routing) -> torch.nn.Module:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    config = SimpleNamespace(
        num_experts_per_tok=routing.top_k, num_experts=count, num_local_experts=count, n_routed_experts=count,
        hidden_size=48, routed_scaling_factor=routing.scale, n_group=routing.groups, topk_group=routing.top_groups,
        topk_method="group_limited_greedy" if routing.groups > 1 else "greedy", norm_topk_prob=routing.renormalize,
        moe_norm_min=1e-12,
    )  # fmt: skip
    if name.startswith("ERNIE"):
        return Ernie4_5_MoeTopKRouter(config)
    return (DeepseekV3TopkRouter if routing.scores == "sigmoid" else DeepseekV2TopkRouter)(config)


@pytest.mark.parametrize(
    "name", ["DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3", "Kimi-K2", "GLM-4.5-Air", "ERNIE-4.5"]
)
def test_routers_of_transformers(name):
    count, routing, has_bias = ROUTINGS[name]
    theirs = transformers_router(name, count, routing)
    torch.nn.init.normal_(theirs.weight)
    bias = torch.randn(count) * 0.1 if has_bias else None
    if has_bias:
        buffer = (
            theirs.moe_statics.e_score_correction_bias if name.startswith("ERNIE") else theirs.e_score_correction_bias
        )
        buffer.data.copy_(bias)
    logits, weights, experts = theirs(torch.randn(50, 48) * 0.3)
    got = route_torch(logits, routing, bias)
    shared = torch.cat((torch.zeros(50, count), torch.ones(50, routing.shared)), dim=1)
    wanted = by_expert(weights, experts, count + routing.shared) + shared
    torch.testing.assert_close(by_expert(*got, count + routing.shared), wanted)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rows", [rows_with_ties, rows_with_anything])
def test_routing_in_c(name, rows):
    count, routing, has_bias = ROUTINGS[name]
    bias = bias_of(count, has_bias)
    for logits in (rows(count), rows(count).bfloat16(), torch.randn(30, count)):
        got, wanted = native_moe.route(logits, routing, bias), route_torch(logits, routing, bias)
        assert got[1].equal(wanted[1])
        torch.testing.assert_close(got[0], wanted[0], equal_nan=True)


def test_nan_counts_as_infinity_and_makes_the_result_nan():
    logits = torch.tensor([[0.0, 1.0, NAN, 3.0, -1.0, -2.0]])
    for kind in (
        {},
        {"renormalize": False},
        {"scores": "sigmoid"},
        {"scores": "sigmoid", "groups": 3, "top_groups": 1},
    ):
        weights, experts = route_torch(logits, Routing(2, **kind))
        assert experts.tolist() == [[2, 3]] and weights[0, 0].isnan()


def test_experts_of_other_groups_are_not_chosen_even_for_minus_infinity():
    logits = torch.tensor([[-INF, -INF, 5.0, -INF]])
    assert route_torch(logits, Routing(2, groups=2))[1].tolist() == [[2, 3]]


def test_what_cannot_be_routed_is_refused():
    for fields, wrong in (
        ({"scores": "tanh"}, "scores is 'tanh'; allowed: softmax"),
        ({"group_score": "mean"}, "group_score is 'mean'; allowed: max, top2_sum"),
        ({"groups": 2, "top_groups": 3}, "top_groups is 3, of 2 groups"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Routing(2, **fields)
    for routing, wrong in (
        (Routing(9), "top_k is 9, but there are 8 experts"),
        (Routing(2, groups=3), "8 experts cannot be split into 3"),
        (Routing(3, groups=4), "top_k is 3, but 1 groups have 2 experts"),
        (Routing(1, groups=8, group_score="top2_sum"), "no two best ones"),
    ):
        with pytest.raises(ValueError, match=wrong):
            routing.check(8)
