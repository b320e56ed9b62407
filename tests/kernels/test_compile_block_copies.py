"""Copies of whole blocks, compiled for a Hopper device without one."""

import pytest

pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.triton import block_copies
from tests.kernels.test_compile import compiled

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")


@pytest.mark.parametrize("kind", ["*i64", "*u8"])
@pytest.mark.parametrize("to_pages", [False, True])
def test_copies_of_blocks(kind, to_pages):
    types = {"table": "*i64", "blocks": "*i64", "start": "i32", "buffer": kind, "page": "i32", "num_layers": "i32"}
    found = compiled(block_copies._copy_kernel, types, {"TO_PAGES": to_pages, "TILE": block_copies.TILE})
    assert "ld.global" in found.asm["ptx"] and "st.global" in found.asm["ptx"]
