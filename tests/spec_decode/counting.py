"""Counts what the engine verifies, from its plans and results."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.core.scheduler import Scheduler


@dataclass
class Verified:
    """Of every row of every plan that had all of its drafts: how many of them were accepted."""

    accepted: list[int] = field(default_factory=list)


def count_verified(monkeypatch: pytest.MonkeyPatch, num_drafts: int) -> Verified:
    """From now on, in engines of this process."""
    found, update = Verified(), Scheduler.update_from_output

    def counted(self, plan, output):
        if plan.num_drafts is not None:
            verified = (plan.num_drafts == num_drafts) & (output.num_sampled > 0)
            found.accepted += (output.num_sampled[verified] - 1).tolist()
        return update(self, plan, output)

    monkeypatch.setattr(Scheduler, "update_from_output", counted)
    return found


def reached(accepted: list[int], position: int) -> float:
    """The share of those that accepted the drafts before it which also accepted the one at `position`."""
    counts = np.asarray(accepted)
    return float((counts > position).sum() / (counts >= position).sum())
