import pytest
import torch

from quire.messages.sampling_params import SamplingParams
from quire.sample.penalties import Penalties
from tests.sample.rows import batch, new_row


def test_a_table_that_cannot_grow_offers_no_slots(monkeypatch):
    penalties = Penalties(8, torch.device("cpu"))
    params = SamplingParams(presence_penalty=1.0)
    joins = iter([True, False])  # the second table finds no memory

    def cat(tables):
        if not next(joins):
            raise torch.OutOfMemoryError("no memory")
        return torch.concatenate(tables)

    monkeypatch.setattr(torch, "cat", cat)
    with pytest.raises(torch.OutOfMemoryError):
        penalties.add_row(new_row(0, params))
    monkeypatch.undo()
    penalties.add_row(new_row(1, params))
    penalties.sampled(torch.tensor([5]), batch([1]))
    assert penalties.apply(torch.zeros(1, 8), batch([1])).tolist() == [[0, 0, 0, 0, 0, -1, 0, 0]]
