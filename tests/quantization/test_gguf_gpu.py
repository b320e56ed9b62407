"""GGUF weights in the packed form of the GPU, by the torch versions of its kernels; tests/gpu has the kernels."""

import logging

import gguf
import pytest
import torch

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.kernels.int_linear import E2M1, PackedIntWeight, dequantize_torch, stack_experts
from quire.kernels.moe_routing import Routing
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.linear_experts import LinearExperts
from quire.layers.parallel import TensorParallel
from quire.models.loading import loader
from quire.quantization.gguf_blocks import FORMATS, decode
from quire.quantization.gguf_gpu import GGUFLinearMethod, GGUFPackedQuantization, pack_blocks
from quire.quantization.int_triton import packed_of
from quire.quantization.select import choose_quantization
from quire.quantization.unquantized import Unquantized
from tests.gguf_models import write_gguf_of, write_random_llama
from tests.models.helpers import CPU, TinyRunner
from tests.models.test_gguf_families import FILES, MIXTURES, RMS_NORM, interleave
from tests.quantization.blocks import Stored, random_blocks
from tests.quantization.test_gguf_linear import take
from tests.tiny_models import prompts, save_tiny

TYPES = list(FORMATS)
METHOD = GGUFLinearMethod(torch.bfloat16)
# Of scales and centres.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("type_name", TYPES)
def test_codes_are_the_numbers_of_the_format(type_name):
    """To the last bit, but for Q6_K's scales, of which float16 keeps 11 bits of 18."""
    blocks, wanted = random_blocks(type_name, 24, 512)
    found = decode(type_name, blocks)
    scales = found.scales.double().repeat_interleave(FORMATS[type_name].group_size, 1)
    is_float = found.kind == "e2m1"
    values = torch.tensor(E2M1).double()[found.codes.int()] if is_float else found.codes.double() - found.middle
    got = values * scales
    if found.centres is not None:
        got += found.centres.double().repeat_interleave(FORMATS[type_name].group_size, 1)
    tolerance = 2**-11 if type_name == "Q6_K" else 2**-22
    assert ((got - wanted.double()).abs() <= tolerance * (wanted.abs() + 32 * scales.abs())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("type_name", TYPES)
def test_packed_weights_are_off_by_a_fraction_of_a_step(type_name, dtype):
    """A format's own rounding is up to half a step, its scale."""
    blocks, wanted = random_blocks(type_name, 40, 512)
    packed = pack_blocks(type_name, blocks, dtype, CPU)
    assert packed.outputs == 40 and packed.inputs == 512
    off = (dequantize_torch(packed, torch.float32) - wanted).abs()
    found = decode(type_name, blocks)
    if found.centres is None:
        assert (off <= wanted.abs() * 2**-11).all(), "scales have 16 bits, the others none to round"
        return
    scales, centres = (t.repeat_interleave(32, 1).abs() for t in (found.scales, found.centres))
    largest = 8 if found.bits == 4 else 16  # codes less the middle, though 5 bits are kept in 8
    assert (off <= (largest * scales + centres) * ROUNDING[dtype]).all()


def test_a_weight_of_many_rows_is_packed_in_pieces(monkeypatch):
    blocks, wanted = random_blocks("Q4_0", 200, 64)
    monkeypatch.setattr("quire.quantization.gguf_gpu.ELEMENTS_AT_A_TIME", 4096)
    packed = pack_blocks("Q4_0", blocks, torch.bfloat16, CPU)
    assert torch.equal(dequantize_torch(packed, torch.float32), wanted)


# Layers


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("types", "products"),
    [(("Q4_K", "Q4_K", "Q6_K"), 2), (("Q8_0", "Q8_0", "Q4_1"), 2), (("Q4_K",) * 3, 1), (("Q4_K", None, "Q5_K"), 3)],
)
def test_a_fused_layer_may_mix_types(types, products):
    """Neighbours that are packed alike are one product. None: a type without a kernel."""
    layer = QKVParallelLinear(256, 32, 4, 2, False, torch.bfloat16, CPU, method=METHOD)
    tensors, weights = [], []
    for seed, (shard, outputs, type_name) in enumerate(zip("qkv", (128, 64, 64), types, strict=True)):
        blocks, weight = random_blocks(type_name or "Q8_0", outputs, 256, seed)
        tensors.append((shard, Stored(type_name, blocks) if type_name else weight))
        weights.append(weight)
    take(layer, *tensors)
    assert len(layer.int_parts) == products
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert off(layer(x), x.float() @ torch.cat(weights).T) < 0.01


def test_fused_kernels_of_members_that_differ():
    layer = MergedColumnParallelLinear(256, [64, 64], False, torch.bfloat16, CPU, method=METHOD)
    stored = [random_blocks(kind, 64, 256, seed) for seed, kind in enumerate(("Q4_K", "Q8_0"))]
    take(layer, *((i, Stored(kind, b)) for i, (kind, (b, _)) in enumerate(zip(("Q4_K", "Q8_0"), stored, strict=True))))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    gain, residual = torch.rand(256), torch.randn(2, 64).bfloat16()
    normed = torch.nn.functional.rms_norm(x.float(), (256,), gain, 1e-6)
    gate, up = (normed @ weight.T for _, weight in stored)
    wanted = torch.nn.functional.silu(gate) * up + residual.float()
    assert off(layer.fused(x, (gain, 1e-6), residual, silu=True), wanted) < 0.02


def test_workers_take_their_part():
    blocks, weight = random_blocks("Q4_0", 64, 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    columns, rows = [], torch.zeros(5, 64)
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        column = MergedColumnParallelLinear(128, [64], False, torch.bfloat16, CPU, tp, METHOD)
        take(column, (0, Stored("Q4_0", blocks)))
        columns.append(column(x))
        row = RowParallelLinear(128, 64, False, torch.bfloat16, CPU, tp, METHOD)
        take(row, (None, Stored("Q4_0", blocks)))
        rows += row.method.apply(row, x[:, rank * 64 : rank * 64 + 64], None).float()
    wanted = x.float() @ weight.T
    assert off(torch.cat(columns, 1), wanted) < 0.01 and off(rows, wanted) < 0.01


class WithNumbers(Stored):
    """One that can also be dequantized, as the loader does where a slot cannot take blocks."""

    def __init__(self, type_name: str, blocks: torch.Tensor, numbers: torch.Tensor) -> None:
        super().__init__(type_name, blocks)
        self.numbers = numbers


def test_blocks_that_workers_would_share_are_dequantized_and_the_log_says_so(caplog):
    blocks, _ = random_blocks("Q4_K", 32, 256)
    row = RowParallelLinear(256, 32, False, torch.bfloat16, CPU, TensorParallel(1, 2), METHOD)
    (slot,) = row.load_slots().values()
    with caplog.at_level(logging.WARNING, "quire"):
        assert not slot.load_directly(Stored("Q4_K", blocks))
        assert not slot.load_directly(Stored("IQ4_XS", blocks)) and not slot.load_directly(Stored("F16", blocks))
    assert "128 inputs of a worker are no whole Q4_K blocks" in caplog.text
    assert "no kernel for IQ4_XS" in caplog.text and "F16" not in caplog.text


def test_a_layer_without_quantized_members_is_an_unquantized_one():
    layer = MergedColumnParallelLinear(64, [32, 32], False, torch.bfloat16, CPU, method=METHOD)
    weight = torch.randn(64, 64).bfloat16()
    take(layer, (0, weight[:32]), (1, weight[32:]))
    x = torch.randn(3, 64).bfloat16()
    assert not hasattr(layer, "int_parts")
    torch.testing.assert_close(layer(x), x @ weight.T, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(type_name, tied):
    vocab, hidden = 100, 256
    blocks, weight = random_blocks(type_name, vocab, hidden)
    embedding = VocabEmbedding(vocab, hidden, torch.bfloat16, CPU, METHOD)
    slots = embedding.load_slots()
    assert slots["weight", None].load_directly(Stored(type_name, blocks))
    head = LMHead(vocab, hidden, torch.bfloat16, CPU, embedding if tied else None, METHOD)
    if tied:
        head.process_after_loading()
    else:
        take(head, (None, Stored(type_name, blocks)))
    ids = torch.tensor([99, 0, 15, 16, 99])
    assert off(embedding(ids), weight[ids]) < 0.004
    many = ids.repeat(300)
    assert torch.equal(embedding(many), embedding(ids).repeat(300, 1))
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert off(head(x), x.float() @ weight.T) < 0.01


def test_rotary_pairs_move_half_a_head_apart():
    blocks, weight = random_blocks("Q8_0", 64, 64)
    layer = MergedColumnParallelLinear(64, [64], False, torch.bfloat16, CPU, method=METHOD)
    take(layer, (0, Stored("Q8_0", blocks, rotary_half=8)))  # four heads of 16
    wanted = weight.view(4, 8, 2, 64).transpose(1, 2).reshape(64, 64)
    packed = layer.int_parts[0].weight
    assert isinstance(packed, PackedIntWeight) and torch.equal(dequantize_torch(packed, torch.float32), wanted)


# Choice


def test_the_choice_on_a_gpu():
    cuda = torch.device("cuda")
    for requested in (None, "gguf"):
        chosen = choose_quantization(requested, {}, torch.bfloat16, cuda, is_gguf=True)
        assert isinstance(chosen, GGUFPackedQuantization) and "Q6_K" in chosen.describe()
    assert isinstance(choose_quantization("dequantized", {}, torch.bfloat16, cuda, is_gguf=True), Unquantized)
    wide = choose_quantization(None, {}, torch.float32, cuda, is_gguf=True)
    assert isinstance(wide, Unquantized) and "dtype is float32" in wide.describe()


# Models: the real loader, as if the CPU were a GPU


@pytest.fixture
def packed_on_cpu(monkeypatch):
    def choose(requested, hf_config, dtype, device, is_gguf=False):
        assert is_gguf
        return Unquantized() if requested == "dequantized" else GGUFPackedQuantization(dtype)

    monkeypatch.setattr(loader, "choose_quantization", choose)


def logits(path, dtype, quantization=None):
    checkpoint = resolve_model(str(path))
    model = loader.load_model(checkpoint, load_hf_config(checkpoint), dtype, CPU, quantization=quantization)
    (prompt,) = prompts((40,))
    return model, TinyRunner(model, 1, dtype=dtype).step([(0, prompt)])[0]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_of_a_model(kind, tmp_path, packed_on_cpu):
    """Types that the gguf package can write."""
    reference = save_tiny("smollm3", tmp_path)
    metadata = RMS_NORM | {"rope.freq_base": 2e6}
    quantized = gguf.GGMLQuantizationType[kind]
    path = write_gguf_of(reference, tmp_path / "model.gguf", "smollm3", metadata, interleave, quantized)
    model, kept = logits(path, torch.bfloat16)
    _, plain = logits(path, torch.float32, "dequantized")
    assert off(kept, plain) < 0.03
    assert hasattr(model.layers[0].self_attn.qkv_proj, "int_parts") and hasattr(model.lm_head, "int_parts")


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "Q4_1") for family in MIXTURES), ("gpt-oss", "MXFP4"), ("qwen3-moe", "Q8_0")]
)
def test_logits_of_experts(family, kind, tmp_path, packed_on_cpu):
    reference = save_tiny(family, tmp_path)
    architecture, metadata, change = FILES[family]
    quantized = gguf.GGMLQuantizationType[kind]
    path = write_gguf_of(reference, tmp_path / "model.gguf", architecture, metadata, change, quantized)
    model, kept = logits(path, torch.bfloat16)
    _, plain = logits(path, torch.float32, "dequantized")
    _, narrow = logits(path, torch.bfloat16, "dequantized")
    assert off(kept, plain) < 2 * off(narrow, plain) + 0.005
    experts = next(module for module in model.modules() if isinstance(module, LinearExperts))
    for layers in (experts.gate_up, experts.down):
        assert stack_experts([packed_of(layer) for layer in layers]) is not None, "one weight for the GPU's kernels"


def test_experts_that_differ_become_alike(tmp_path, packed_on_cpu):
    """What a layer on a GPU does with experts whose gate and up have different types."""
    experts = LinearExperts(3, Routing(2), 64, 32, torch.bfloat16, CPU, [(METHOD, METHOD)] * 3)
    stored = {}
    for e in range(3):
        kinds = ("Q8_0", "Q4_0") if e == 1 else ("Q8_0", "Q8_0")
        stored[e] = [random_blocks(kind, 32, 64, e, size=0.1) for kind in kinds], random_blocks("Q8_0", 64, 32, e)
        gate_up, down = stored[e]
        take(experts.gate_up[e], *((i, Stored(kinds[i], gate_up[i][0])) for i in (0, 1)))
        take(experts.down[e], (None, Stored("Q8_0", down[0])))
    x, router = torch.randn(5, 64).bfloat16(), torch.randn(5, 3)
    before = experts(x, router)
    gate_up, down = experts._dequantized()
    assert torch.equal(down[2], stored[2][1][1].bfloat16()) and gate_up.shape == (3, 64, 64)
    torch.testing.assert_close(gate_up[1].float(), torch.cat([w for _, w in stored[1][0]]), atol=0, rtol=2**-7)
    assert off(experts(x, router), before) < 0.02


def k_m(name: str) -> str:
    """As in files called Q4_K_M."""
    return "Q6_K" if name.endswith(("attn_v", "ffn_down", "output")) else "Q4_K"


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q4_K_M"])
def test_logits_of_types_of_256(kind, tmp_path, packed_on_cpu):
    path = write_random_llama(tmp_path / "model.gguf", k_m if kind == "Q4_K_M" else lambda name: kind)
    model, kept = logits(path, torch.bfloat16)
    _, plain = logits(path, torch.float32, "dequantized")
    _, narrow = logits(path, torch.bfloat16, "dequantized")
    assert off(kept, plain) < 2 * off(narrow, plain)
    products = 2 if kind == "Q4_K_M" else 1
    assert all(len(layer.self_attn.qkv_proj.int_parts) == products for layer in model.layers)
