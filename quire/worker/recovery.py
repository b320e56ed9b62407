"""Recovery from a failed step: reset workspaces, probe the device."""

from collections.abc import Callable

import torch

from quire.messages.plan import DeviceLostError


class Recovery:
    def __init__(
        self, device: torch.device, reset_workspaces: Callable[[], None], probe: Callable[[], None] | None = None
    ) -> None:
        """`probe` raises if the device no longer computes; by default, on a GPU, a tiny operation."""
        self._reset_workspaces = reset_workspaces
        self._probe = probe or (cuda_probe(device) if device.type == "cuda" else _nothing)

    def after(self, error: Exception) -> None:
        """Prepare the device for the next step. A sticky CUDA error, which every later call would raise again, ends the
        engine: no request could be served."""
        self.probe(error, self._reset_workspaces)

    def probe(self, error: Exception, then: Callable[[], None] | None = None) -> None:
        """As `after` the error of a result, whose step was launched to its end: there is nothing to reset, and the
        thread that waits for results may not, while another launches the next step."""
        try:
            self._probe()
            if then is not None:
                then()
        except Exception as fault:
            raise DeviceLostError(f"the device no longer computes: {type(error).__name__}: {error}") from fault


def cuda_probe(device: torch.device) -> Callable[[], None]:
    number = torch.zeros(1, device=device)  # now: later there may be no memory for it

    @torch.inference_mode()
    def probe() -> None:
        number.add_(1)
        torch.cuda.synchronize(device)

    return probe


def _nothing() -> None: ...
