"""How rows are routed to experts: one declared value for all families, and the torch version of it."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F

# topk_softmax: over the logits of the chosen experts alone.
Scores = Literal["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "top2_sum"]
Routes = tuple[torch.Tensor, torch.Tensor]  # weights [N, slots] float32, experts [N, slots] int32

SCORES, GROUP_SCORES = get_args(Scores), get_args(GroupScore)  # the C and Triton kernels number them in this order


@dataclass(frozen=True)
class Routing:
    """Which experts a row of router logits chooses, and how much each counts.

    Chosen are the `top_k` experts of the greatest score, plus a bias if the router has one, within the `top_groups`
    groups of the greatest score. Of equal ones the lower index is first. NaN counts as infinity in the choice:
    whatever a row holds, its experts exist, and with a NaN logit its result is NaN. Weights are scores without the
    bias.
    """

    top_k: int
    scores: Scores = "softmax"
    renormalize: bool = True  # weights are divided by their sum
    epsilon: float = 0.0  # plus this
    scale: float = 1.0  # of the weights
    groups: int = 1  # of neighbouring experts, equally many in each
    top_groups: int = 1
    group_score: GroupScore = "max"  # of a group's experts, or the sum of the two greatest
    shared: int = 0  # experts after all others that every row has too, with weight 1

    def __post_init__(self) -> None:
        for name, value, allowed in (("scores", self.scores, SCORES), ("group_score", self.group_score, GROUP_SCORES)):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        if self.top_k < 1 or self.shared < 0:
            raise ValueError(f"top_k is {self.top_k} and shared {self.shared}; allowed: from 1, and from 0")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups is {self.top_groups}, of {self.groups} groups; allowed: 1 to {self.groups}")

    @property
    def slots(self) -> int:
        """Experts of a row."""
        return self.top_k + self.shared

    @property
    def of_chosen(self) -> bool:
        """Weights are relative to those of the chosen experts."""
        return self.renormalize or self.scores == "topk_softmax"

    @property
    def has_groups(self) -> bool:
        return self.top_groups < self.groups

    def by_logits(self, has_bias: bool) -> bool:
        """Whether the choice is by logits: a softmax keeps their order, but rounds close ones to equal scores."""
        sums = self.has_groups and self.group_score == "top2_sum"
        return self.scores in ("softmax", "topk_softmax") and not has_bias and not sums

    def with_shared(self, shared: int) -> "Routing":
        return replace(self, shared=shared)

    def check(self, num_experts: int) -> None:
        """ValueError if so many experts, without the shared ones, cannot be chosen from."""
        if self.top_k > num_experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {num_experts} experts; allowed: 1 to {num_experts}")
        if num_experts % self.groups:
            raise ValueError(f"{num_experts} experts cannot be split into {self.groups} equal groups")
        size = num_experts // self.groups
        if self.has_groups and self.group_score == "top2_sum" and size < 2:
            raise ValueError(f"a group of {size} expert has no two best ones; use fewer than {self.groups} groups")
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"top_k is {self.top_k}, but {self.top_groups} groups have {self.top_groups * size} experts"
            )


def route_torch(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    """logits [N, E], bias [E] -> weights and experts, the greatest of the choice first, then the shared ones."""
    routing.check(logits.shape[1])
    wide = logits.float()
    scores, choice = _scores(wide, routing, bias)
    choice = _as_inf(choice)
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
    if routing.has_groups:
        outside = ~_in_top_groups(choice, routing)
        order = order.gather(1, torch.sort(outside.gather(1, order).int(), dim=-1, stable=True).indices)
    experts = order[:, : routing.top_k]
    if routing.by_logits(bias is not None) and routing.of_chosen and not routing.epsilon:
        weights = wide.gather(1, experts).softmax(-1)
    else:
        weights = scores.gather(1, experts)
        if routing.of_chosen:
            weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    weights = weights * routing.scale if routing.scale != 1.0 else weights
    if routing.shared:
        rows, count = logits.shape
        always = torch.arange(count, count + routing.shared, device=logits.device).expand(rows, -1)
        weights = torch.cat((weights, torch.ones_like(always, dtype=torch.float32)), dim=1)
        experts = torch.cat((experts, always), dim=1)
    return weights, experts.int()


def _scores(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, E] float32: scores, and what the choice is by."""
    if routing.scores == "sigmoid":
        scores = logits.sigmoid()
    elif routing.scores == "sqrtsoftplus":
        scores = F.softplus(logits).sqrt()
    else:
        scores = logits.softmax(-1)
    if routing.by_logits(bias is not None):
        return scores, logits
    return scores, scores if bias is None else scores + bias


def _in_top_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[N, E] bool."""
    by_group = choice.unflatten(1, (routing.groups, -1))
    best = by_group.topk(2 if routing.group_score == "top2_sum" else 1, dim=-1).values.sum(-1)
    order = torch.sort(_as_inf(best), dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order[:, : routing.top_groups], True)
    return kept[:, :, None].expand_as(by_group).flatten(1)


def _as_inf(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.inf, x)
