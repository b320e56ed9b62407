"""Copies of whole blocks, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.block_copies import gather_blocks, gather_blocks_torch, page_table, scatter_blocks


@pytest.mark.parametrize(("dtype", "page"), [(torch.int64, 1500), (torch.uint8, 37)])
def test_blocks_to_a_buffer_and_back(dtype, page):
    pages = [torch.randint(0, 100, (9, page), dtype=dtype) for _ in range(3)]
    before = [one.clone() for one in pages]
    blocks = torch.tensor([7, 2, 5])
    buffer, expected = (torch.zeros(3, 3, page, dtype=dtype) for _ in range(2))
    gather_blocks(pages, page_table(pages), blocks, buffer)
    gather_blocks_torch(pages, blocks, expected)
    assert torch.equal(buffer, expected)
    scatter_blocks(pages, page_table(pages), torch.tensor([1, 8, 3]), buffer)
    scatter_blocks(pages, page_table(pages), torch.tensor([0, 4, 6, 0]), buffer[1:], start=1)
    gather_blocks(pages, page_table(pages), torch.tensor([1, 1, 4, 6]), buffer[:2], start=2)
    assert torch.equal(buffer[:2], expected[1:])
    for old, new in zip(before, pages, strict=True):
        old[[1, 8, 3, 4, 6]] = old[[7, 2, 5, 2, 5]]
        assert torch.equal(old, new)
