"""Drafts of one completion, and how many of their tokens were accepted; names are vLLM's."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpecDecodeMetrics:
    num_spec_tokens: int  # the most drafts of a step
    detailed: bool = False
    acceptance_histogram: list[int] = field(default_factory=list)  # steps by the number of drafts accepted
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.acceptance_histogram = [0] * (1 + self.num_spec_tokens)

    def add(self, drafted: int, num_tokens: int) -> None:
        """A step verified so many drafts, and gave so many tokens: without drafts it would have been one."""
        accepted = max(0, min(drafted, num_tokens - 1))
        self.acceptance_histogram[accepted] += 1
        self.num_draft_tokens += drafted
        if self.detailed:
            self.per_step_accepted.append(accepted)
            self.per_step_drafted.append(drafted)

    @property
    def num_spec_steps(self) -> int:
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(count * steps for count, steps in enumerate(self.acceptance_histogram))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with drafts gave, the one that it would have given anyway included."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
            "per_step_accepted": list(self.per_step_accepted) if self.detailed else None,
            "per_step_drafted": list(self.per_step_drafted) if self.detailed else None,
        }
