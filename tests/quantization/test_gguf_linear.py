"""GGUF weights that stay quantized: the kernels against float64, layers of mixed types, and the real SmolLM2."""

import math
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.kernels import native
from quire.kernels.native import quantized
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.parallel import TensorParallel
from quire.models.loading.loader import load_model
from quire.platforms.cpu_facts import cpu_flags
from quire.quantization.block_quantized import BlockQuantizedLinearMethod, block_quantized_weights
from quire.quantization.select import choose_quantization
from quire.quantization.unquantized import Unquantized
from tests.engine.test_smollm2 import PROMPTS
from tests.models.helpers import CPU
from tests.properties import examples
from tests.quantization.blocks import Stored, random_blocks

TYPES = list(quantized.FORMATS)
GROUP = quantized.GROUP


def error_bound(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Rounding x to int8 moves a number by at most half a step, max|x| / 254 of its group, and so a product by at most
    that times the sum of |w|. Then sums in float32, and the result in the type of x."""
    half_steps = x.double().unflatten(1, (-1, GROUP)).abs().amax(2) / 254
    sizes = weight.double().abs().unflatten(1, (-1, GROUP)).sum(2)
    largest = (x.double().abs() @ weight.double().abs().T) * x.shape[1] ** 0.5
    result = wanted.abs() * (2**-8 if x.dtype is torch.bfloat16 else 2**-24)
    # q * d is summed before m * sum(q) is subtracted, which may be much larger than their difference.
    return half_steps @ sizes.T * 1.0001 + largest * 32 * 2**-24 + result


def check_product(type_name: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    blocks, weight = random_blocks(type_name, outputs, inputs, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    x = (x * torch.randn(rows, 1, generator=generator).exp()).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if seed % 2 else None
    packed = quantized.pack(type_name, blocks, inputs)
    fused = quantized.fuse([packed])
    got = quantized.linear(x, fused, bias)
    wanted = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    assert got.dtype is dtype
    assert ((got.double() - wanted).abs() <= error_bound(x, weight, wanted)).all()
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(quantized.linear(x[row : row + 1], fused, bias)[0], got[row])


@pytest.mark.parametrize("type_name", TYPES)
@settings(max_examples=examples(12))
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 130),
    blocks=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_are_within_the_rounding_of_activations(type_name, rows, outputs, blocks, dtype, seed):
    check_product(type_name, rows, outputs, blocks * quantized.FORMATS[type_name].elements, dtype, seed)


@pytest.fixture(scope="module", params=["portable", "avx2"])
def lesser_machine(request):
    """The library as compiled for processors with fewer instructions."""
    if platform.machine() != "x86_64" or (request.param == "avx2" and not {"avx2", "fma", "f16c"} <= cpu_flags()):
        return None  # it would be the same, or could not run
    flags = {"portable": "-march=x86-64", "avx2": "-march=haswell"}[request.param]
    made = native.library(flags, only=("quantized.c", "quantized_pack.c", "threads.c"))
    assert made.quire_quantized_kind() == ["portable", "avx2"].index(request.param)
    return made


@pytest.mark.parametrize("type_name", TYPES)
def test_products_on_lesser_machines(type_name, lesser_machine, monkeypatch):
    def function(name):
        found = getattr(lesser_machine, name)
        found.argtypes = [native._KINDS[kind] for kind in native._SIGNATURES[name].replace(" ", "")]
        return found

    if lesser_machine is not None:
        monkeypatch.setattr(quantized, "native_function", function)
    for rows, outputs, seed in [(1, 40, 1), (7, 33, 2), (20, 16, 3)]:
        check_product(type_name, rows, outputs, 512, torch.float32, seed)
    blocks, weight = random_blocks(type_name, 37, 512)
    packed = quantized.pack(type_name, blocks, 512)
    assert torch.equal(quantized.lookup(torch.arange(37), packed, torch.float32), weight)


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_and_threads_do_not_change_a_result(type_name):
    """More inputs than are kept at a time too: rows in the second piece are like those in the first."""
    blocks, _ = random_blocks(type_name, 200, 4096)
    fused = quantized.fuse([quantized.pack(type_name, blocks, 4096)])
    x = torch.randn(150, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        all_at_once = quantized.linear(x, fused, None)
        torch.set_num_threads(2)
        assert torch.equal(quantized.linear(x, fused, None), all_at_once)
        parts = [quantized.linear(part, fused, None) for part in x.split([1, 2, 3, 4, 5, 6, 7, 64, 58])]
        assert torch.equal(torch.cat(parts), all_at_once)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("type_name", TYPES)
def test_lookup_gives_the_numbers_of_the_format(type_name):
    blocks, weight = random_blocks(type_name, 37, 512)
    packed = quantized.pack(type_name, blocks, 512)
    ids = torch.tensor([36, 0, 16, 15, 36, 17])
    assert torch.equal(quantized.lookup(ids, packed, torch.float32), weight[ids])
    assert torch.equal(quantized.lookup(ids.int(), packed, torch.bfloat16), weight[ids].bfloat16())


def test_numbers_that_are_not_finite_are_not_hidden():
    blocks, _ = random_blocks("Q4_1", 16, 64)
    fused = quantized.fuse([quantized.pack("Q4_1", blocks, 64)])
    x = torch.ones(3, 64)
    x[1, 40] = float("nan")
    got = quantized.linear(x, fused, None)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
    assert torch.equal(quantized.linear(torch.zeros(1, 64), fused, None), torch.zeros(1, 16))


# Layers


def take(layer, *tensors: tuple[object, Stored | torch.Tensor]) -> None:
    """Fill a layer as the loader does."""
    slots = layer.load_slots()
    for shard, tensor in tensors:
        slot = slots.pop(("weight", shard))
        if not slot.load_directly(tensor):
            with slot.opened() as view:
                view.copy_(slot.part_of(tensor))
    assert not slots
    layer.process_after_loading()


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q8_0", "Q4_1"), ("Q4_K", None, "Q5_K")])
def test_a_fused_layer_may_mix_types(types):
    """None: a type without a kernel, which is dequantized in the layer."""
    layer = QKVParallelLinear(256, 32, 4, 2, False, torch.float32, CPU, method=BlockQuantizedLinearMethod())
    tensors, weights = [], []
    for seed, (shard, outputs, type_name) in enumerate(zip("qkv", (128, 64, 64), types, strict=True)):
        blocks, weight = random_blocks(type_name or "Q8_0", outputs, 256, seed)
        tensors.append((shard, Stored(type_name, blocks) if type_name else weight))
        weights.append(weight)
    take(layer, *tensors)
    weight = torch.cat(weights)
    for rows in (1, 9):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        wanted = x.double() @ weight.double().T
        assert ((layer(x).double() - wanted).abs() <= error_bound(x, weight, wanted)).all()


def test_workers_take_their_part():
    blocks, weight = random_blocks("Q4_0", 64, 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    columns, rows = [], torch.zeros(5, 64)
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        column = MergedColumnParallelLinear(128, [64], False, torch.float32, CPU, tp, BlockQuantizedLinearMethod())
        take(column, (0, Stored("Q4_0", blocks)))
        columns.append(column(x))
        row = RowParallelLinear(128, 64, False, torch.float32, CPU, tp, BlockQuantizedLinearMethod())
        take(row, (None, Stored("Q4_0", blocks)))
        rows += row.method.apply(row, x[:, rank * 64 : rank * 64 + 64], None)
    wanted = x.double() @ weight.double().T
    for got in (torch.cat(columns, dim=1), rows):
        assert ((got.double() - wanted).abs() <= error_bound(x, weight, wanted)).all()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_a_large_weight_is_packed_in_parts(monkeypatch, type_name):
    blocks, _ = random_blocks(type_name, 160, 256)
    arguments = (type_name, blocks, 256, range(16, 16 + 5 * 16 + 9), 8)
    whole = quantized.pack(*arguments)
    monkeypatch.setattr(quantized, "PART_BYTES", 2 * whole.data.shape[1])  # two panels
    assert torch.equal(quantized.pack(*arguments).data, whole.data)


def test_rotary_pairs_move_half_a_head_apart():
    blocks, weight = random_blocks("Q4_1", 64, 64)
    packed = quantized.pack("Q4_1", blocks, 64, rotary_half=8)  # four heads of 16
    wanted = weight.view(4, 8, 2, 64).transpose(1, 2).reshape(64, 64)
    assert torch.equal(quantized.lookup(torch.arange(64), packed, torch.float32), wanted)


# Choice


@pytest.mark.parametrize(
    ("requested", "dtype", "device", "message"),
    [
        ("gguf", torch.float32, "cuda", "dtype is float32, .* only; allowed here: dequantized"),
        ("gguf", torch.float16, "cpu", "dtype is float16"),
        ("int4", torch.bfloat16, "cpu", "the checkpoint is a GGUF; allowed: gguf"),
        ("bitsandbytes", torch.bfloat16, "cuda", "the checkpoint is a GGUF; allowed: gguf"),
        ("gptq", torch.bfloat16, "cpu", "the checkpoint is a GGUF; allowed: gguf"),
    ],
)
def test_what_cannot_be_is_refused(requested, dtype, device, message):
    with pytest.raises(ValueError, match=message):
        choose_quantization(requested, {}, dtype, torch.device(device), is_gguf=True)


def test_without_kernels_weights_are_dequantized(monkeypatch):
    assert choose_quantization(None, {}, torch.bfloat16, CPU, is_gguf=True).describe().startswith("gguf: weights stay")
    requested = choose_quantization("dequantized", {}, torch.bfloat16, CPU, is_gguf=True)
    assert isinstance(requested, Unquantized) and "as requested" in requested.describe()
    monkeypatch.setattr(quantized, "is_fast", lambda: False)
    assert "no instructions" in choose_quantization(None, {}, torch.bfloat16, CPU, is_gguf=True).describe()
    monkeypatch.setattr(quantized, "is_available", lambda: False)
    assert "no C compiler" in choose_quantization(None, {}, torch.bfloat16, CPU, is_gguf=True).describe()
    with pytest.raises(ValueError, match="is 'gguf', but the checkpoint is not quantized"):
        choose_quantization("gguf", {}, torch.bfloat16, CPU)


# SmolLM2: most of it Q4_1, the embedding and head Q8_0

TEXT = (
    "The printing press changed how people learned about the world. Before it, a book was copied by hand, and a "
    "single mistake could travel from one copy to the next for centuries. Afterwards, hundreds of equal pages "
    "could be made in a day, and readers in distant towns could discuss the same sentence on the same page. "
    "Prices fell, schools grew, and arguments that had once been kept inside monasteries were carried on in "
    "public. It did not happen at once: the first printers were goldsmiths and merchants who borrowed money, "
    "quarrelled with their partners, and often failed."
)
NUM_TOKENS = 32


def test_only_the_packed_form_stays():
    ckpt = resolve_model(None)
    model = load_model(ckpt, load_hf_config(ckpt), torch.bfloat16, "cpu")
    assert model.num_parameters == 134_515_008
    weights = block_quantized_weights(model)
    assert len(weights) == 30 * 4 + 1
    packed = sum(part.nbytes for weight in weights for part in weight.parts)
    assert packed < 1.01 * sum(t.raw().numel() for t in open_tensors(ckpt) if t.type_name in TYPES)
    assert sum(p.numel() for p in model.parameters()) == 61 * 576  # the norms


@pytest.fixture(scope="module")
def runs():
    """Greedy tokens with the best two log-probabilities of each, and the log-probabilities of TEXT, of both models."""
    found = {}
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for quantization in ("gguf", "dequantized"):
        with LLM(dtype="float32", quantization=quantization, max_model_len=512, kv_cache_memory_bytes=1 << 27) as llm:
            outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
            (text,) = llm.generate(TEXT, scored, use_tqdm=False)
            alone = llm.generate(PROMPTS[0], greedy, use_tqdm=False)[0].outputs[0]
        found[quantization] = [output.outputs[0] for output in outputs], text.prompt_logprobs, alone
    return found


def perplexity(prompt_logprobs) -> float:
    values = [next(iter(entry.values())).logprob for entry in prompt_logprobs if entry is not None]
    return math.exp(-sum(values) / len(values))


def test_perplexity_is_that_of_the_dequantized_model(runs):
    kept, full = (perplexity(runs[name][1]) for name in ("gguf", "dequantized"))
    assert abs(kept / full - 1) < 0.005


def test_greedy_texts_part_only_at_near_ties(runs):
    """Rounding activations moves a log-probability by some hundredths. Where the two models choose differently, the
    dequantized one's own choice was no clearer than that."""
    agreed = 0
    for kept, full in zip(runs["gguf"][0], runs["dequantized"][0], strict=True):
        same = next((i for i in range(NUM_TOKENS) if kept.token_ids[i] != full.token_ids[i]), NUM_TOKENS)
        agreed += same
        if same < NUM_TOKENS:
            best = full.logprobs[same]
            assert best[full.token_ids[same]].logprob - best[kept.token_ids[same]].logprob < 0.25
    assert agreed >= 0.8 * len(PROMPTS) * NUM_TOKENS


def test_a_request_alone_gives_the_same_tokens(runs):
    together, _, alone = runs["gguf"]
    assert alone.token_ids == together[0].token_ids
