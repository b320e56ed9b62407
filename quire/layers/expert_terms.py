"""The interface through which adapters add their terms to the outputs of experts."""

from typing import Protocol

import torch


class ExpertTerms(Protocol):
    """`rows` are those of the step that `x` and `out` are; None: all, in order."""

    @property
    def active(self) -> bool:
        """Whether some row of the step has an adapter."""
        ...

    def add_gate_up(self, out: torch.Tensor, x: torch.Tensor, expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        """`out`, changed in place."""
        ...

    def add_down(self, out: torch.Tensor, x: torch.Tensor, expert: int, rows: torch.Tensor | None) -> torch.Tensor: ...
