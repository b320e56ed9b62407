import pytest
import torch

from quire.messages.sampling_params import SamplingParams
from quire.sample.penalties import Penalties, penalty_table_bytes
from tests.sample.rows import batch, new_row


def test_table_bytes_equal_the_peak_of_growing():
    penalties, params = Penalties(100, torch.device("cpu")), SamplingParams(presence_penalty=1.0)
    for row in range(9):
        penalties.add_row(new_row(row, params))
    kept = sum(table.nbytes for table in (penalties._in_prompt, penalties._counts, penalties._strength))
    assert penalty_table_bytes(9, 100) == kept * 3 // 2


def test_a_table_that_cannot_grow_offers_no_slots(monkeypatch):
    penalties = Penalties(8, torch.device("cpu"))
    params = SamplingParams(presence_penalty=1.0)
    found = iter([True, False])  # the second table finds no memory

    def new_zeros(table, *shape):
        if not next(found):
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros(shape, dtype=table.dtype)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    with pytest.raises(torch.OutOfMemoryError):
        penalties.add_row(new_row(0, params))
    monkeypatch.undo()
    penalties.add_row(new_row(1, params))
    penalties.sampled(torch.tensor([5]), batch([1]))
    assert penalties.apply(torch.zeros(1, 8), batch([1])).tolist() == [[0, 0, 0, 0, 0, -1, 0, 0]]
