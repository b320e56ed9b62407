"""The tests' own packer and our decoders against the compressed-tensors library, where it is installed."""

import pytest
import torch

from quire.quantization.compressed_tensors import CompressedConfig
from tests.quantization.int_checkpoints import compressed, group, packed_tensors, plain_tensors, quantize

compressors = pytest.importorskip("compressed_tensors.compressors")

CASES = [(4, 32, True), (4, 64, False), (4, None, True), (8, 32, True), (8, None, False), (8, 64, False)]


@pytest.mark.parametrize(("bits", "group_size", "sym"), CASES)
@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized"])
def test_the_library_reads_the_same_weight(kind, bits, group_size, sym):
    from compressed_tensors.quantization import QuantizationScheme

    q = quantize(torch.randn(40, 128), bits, group_size or -1, sym, scale_type=torch.bfloat16)
    write = packed_tensors if kind == "pack-quantized" else plain_tensors
    tensors = write(q, bits, sym)
    each = group(bits, group_size, sym)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    scales = {"weight_scale": q.scales.float()}  # else the product is in their type
    read = compressor.decompress(tensors | scales, QuantizationScheme(**each))["weight"]
    torch.testing.assert_close(read, q.dequantized(), rtol=0, atol=0)
    scheme = CompressedConfig.parse(compressed(each, kind=kind)).scheme("model.layers.0.mlp.up_proj")
    decoded, ours = scheme.decode(tensors | scales, 40, group_size or 128), torch.empty(40, 128)
    decoded.dequantize_into(ours)
    torch.testing.assert_close(ours, read, rtol=0, atol=0)
