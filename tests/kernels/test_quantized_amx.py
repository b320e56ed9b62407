"""Quantized weights times many rows on AMX: the tile instructions in software, against products in float32."""

import ctypes

import pytest
import torch

from quire.kernels import native
from quire.kernels.native import quantized
from quire.kernels.native.build import library
from tests.quantization.blocks import random_blocks

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

FILES = ("amx.c", "linear.c", "quantized.c", "threads.c")


@pytest.fixture(scope="module")
def multiply():
    emulated = library("-DQUIRE_EMULATE_AMX", only=FILES)
    function = emulated.quire_quantized_linear_amx
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, size, pointer, pointer, size, size, size]
    return function


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("name", quantized.FORMATS)
def test_products_are_those_of_the_numbers_that_weights_stand_for(multiply, name, rows):
    torch.manual_seed(0)
    inputs, sizes = 512, (288, 32, 64)  # more panels than are made at once; segments that threads share
    made = [random_blocks(name, size, inputs, seed) for seed, size in enumerate(sizes)]
    parts = [quantized.pack(name, blocks, inputs) for blocks, _ in made]
    fused = quantized.fuse(parts)
    x, bias = torch.randn(rows, inputs).bfloat16(), torch.randn(sum(sizes)).bfloat16()
    out = torch.empty(rows, sum(sizes), dtype=torch.bfloat16)
    multiply(
        x.data_ptr(), fused.table.data_ptr(), len(parts), bias.data_ptr(), out.data_ptr(), rows, sum(sizes), inputs
    )
    weight = torch.cat([numbers for _, numbers in made]).bfloat16().float()
    wanted = x.float() @ weight.T + bias.float()
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.std()))
