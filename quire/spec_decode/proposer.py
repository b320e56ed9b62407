"""What a proposer must offer, and finding the one that was configured."""

import importlib
from typing import Protocol

import torch

from quire.config import EngineConfig
from quire.kernels.accept_drafts import DraftRows


class Proposer(Protocol):
    """Made as `Class(config, device)`. Any drafts are safe: a wrong one costs its part of a step, never a token."""

    def propose(self, rows: torch.Tensor, state: DraftRows) -> None:
        """After every step: write guesses behind the known tokens of rows ([n], -1 for padding) that may decode next,
        state.token_ids[row, num_tokens : num_tokens + num_drafts], on the current stream, without waiting for it."""
        ...


def make_proposer(config: EngineConfig, device: torch.device) -> Proposer | None:
    place = config.speculative.method
    if place is None:
        return None
    module, _, name = place.partition(":")
    try:
        proposer: Proposer = getattr(importlib.import_module(module), name)(config, device)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"speculative_config: method {place!r} cannot be imported: {error}") from error
    return proposer
