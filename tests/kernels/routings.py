"""Routings of the families there are, and rows of logits that are hard to route."""

import torch

from quire.kernels.moe_routing import Routing

INF, NAN = float("inf"), float("nan")
# name -> (experts, routing, whether a bias corrects the choice)
ROUTINGS = {
    "Mixtral": (8, Routing(2), False),
    "OLMoE": (64, Routing(8, renormalize=False), False),
    "gpt-oss": (32, Routing(4, "topk_softmax"), False),
    "DeepSeek-V2-Lite": (64, Routing(6, renormalize=False, shared=2), False),
    "DeepSeek-V2": (160, Routing(6, renormalize=False, scale=16.0, groups=8, top_groups=3, shared=2), False),
    "DeepSeek-V3": (
        256,
        Routing(8, "sigmoid", epsilon=1e-20, scale=2.5, groups=8, top_groups=4, group_score="top2_sum", shared=1),
        True,
    ),
    "Kimi-K2": (384, Routing(8, "sigmoid", epsilon=1e-20, scale=2.827, shared=1), True),
    "GLM-4.5-Air": (128, Routing(8, "sigmoid", epsilon=1e-20, shared=1), True),
    "ERNIE-4.5": (64, Routing(6, epsilon=1e-12, shared=2), True),
    "sigmoid, not normalised": (10, Routing(3, "sigmoid", renormalize=False, scale=0.5), False),
    "sums of softmax groups": (24, Routing(5, groups=6, top_groups=3, group_score="top2_sum"), False),
    "root of softplus": (40, Routing(4, "sqrtsoftplus", scale=1.5), True),
    "no power of two": (36, Routing(3, "sigmoid", groups=3, top_groups=2, group_score="top2_sum", shared=3), True),
}


def rows_with_ties(num_experts: int) -> torch.Tensor:
    """Of few values, so that many are equal."""
    return torch.randint(-6, 6, (12, num_experts)) / 2


def rows_with_anything(num_experts: int) -> torch.Tensor:
    """A row each with NaN first, last and everywhere, with infinities of either sign and of both."""
    logits = rows_with_ties(num_experts)
    logits[0, 0] = logits[1, -1] = NAN
    logits[2], logits[3], logits[4], logits[5] = NAN, INF, -INF, 0.0
    logits[6, ::3] = INF
    logits[7, ::2] = -INF
    logits[8, 1], logits[8, 2], logits[8, 3] = NAN, INF, -INF
    return logits


def bias_of(num_experts: int, has_bias: bool) -> torch.Tensor | None:
    """Also of few values."""
    return torch.randint(-2, 3, (num_experts,)) / 8 if has_bias else None
