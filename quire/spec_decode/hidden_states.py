"""Hidden states of the target that a proposer reads after each step."""

from collections.abc import Sequence

import torch

from quire.models.base import FINAL


class HiddenStates:
    """Of every token of a step, side by side in the order of `outputs`: layer i is the residual stream that enters it
    (layer 0 is the first; as many as there are layers: what leaves the last), FINAL the head's input. Steps of up to
    `max_tokens` leave them at one address, where captured steps write and captured proposals read."""

    def __init__(self, outputs: Sequence[int | str], num_rows: int, max_tokens: int, device: torch.device) -> None:
        self.outputs = tuple(outputs)
        self.layers = tuple(dict.fromkeys(output for output in outputs if isinstance(output, int)))
        self.max_tokens = max_tokens
        self.states: torch.Tensor | None = None  # [max_tokens, width]
        self.first_positions = torch.zeros(num_rows, dtype=torch.int64, device=device)  # of the step, by row
        self._large: torch.Tensor | None = None  # of the last step with more tokens

    def begin(self, num_computed: torch.Tensor) -> None:
        """A step begins, before which rows [num_rows] had computed so many tokens."""
        self.first_positions.copy_(num_computed)

    def streams(self) -> dict[int, torch.Tensor | None]:
        """For the model to fill (ForwardContext.streams)."""
        return dict.fromkeys(self.layers)

    def keep(self, streams: dict[int, torch.Tensor | None], final: torch.Tensor) -> None:
        parts = [final if output == FINAL else streams[output] for output in self.outputs]  # type: ignore[index]
        if self.states is None:
            self.states = final.new_zeros(self.max_tokens, final.shape[1] * len(parts))
        count = len(final)
        if count <= self.max_tokens:
            torch.cat(parts, dim=1, out=self.states[:count])  # type: ignore[arg-type]
        else:
            self._large = torch.cat(parts, dim=1)  # type: ignore[arg-type]

    def of_step(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, width] of the last step. A replayed step has left them without a call of `keep`."""
        kept = self.states if num_tokens <= self.max_tokens else self._large
        assert kept is not None, "no step has run"
        return kept[:num_tokens]
