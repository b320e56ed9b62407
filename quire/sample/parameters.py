"""Sampling parameters by row, kept on the device."""

import math

import torch

from quire.kernels.sample_tokens import DrawParameters
from quire.messages.sampling_params import SamplingParams


class ParameterTable:
    """One table for all parameters, so that all new rows of a step are uploaded in one copy."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._table = torch.zeros(7, num_rows, dtype=torch.int32, device=device)
        on_host = device.type == "cpu"
        self._host = self._table if on_host else torch.zeros(7, num_rows, dtype=torch.int32)
        self._changed = False
        self.device = _columns(self._table)
        columns = _columns(self._host)
        self._seeds, self._greedy = columns.seeds.numpy(), columns.greedy.numpy()
        self._temperature, self._log_min_p = columns.temperature.numpy(), columns.log_min_p.numpy()
        self._top_p, self._top_k = columns.top_p.numpy(), columns.top_k.numpy()

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        greedy = params.greedy
        self._seeds[row] = seed
        self._greedy[row] = greedy
        self._temperature[row] = 1.0 if greedy else params.temperature
        self._log_min_p[row] = -math.inf if greedy or not params.min_p else math.log(params.min_p)
        self._top_p[row] = 1.0 if greedy else params.top_p
        self._top_k[row] = 0 if greedy else max(0, params.top_k)
        self._changed = self._table is not self._host

    def upload(self) -> None:
        """Copy changes to the device, on the current stream."""
        if self._changed:
            # A fresh pinned copy: the host may change the table again before the device has read it.
            self._table.copy_(self._host.pin_memory(), non_blocking=True)
            self._changed = False


def _columns(table: torch.Tensor) -> DrawParameters:
    """Views of the table's columns in their own dtypes; seeds span two."""
    floats = table.view(torch.float32)
    return DrawParameters(
        seeds=table[:2].view(-1).view(torch.int64),
        temperature=floats[2],
        log_min_p=floats[3],
        top_p=floats[4],
        top_k=table[5],
        greedy=table[6],
    )
