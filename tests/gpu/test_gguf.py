"""GGUF weights that stay quantized on a GPU: every type in graphs, kernels at shapes of real models, whole files."""

import gguf
import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.int_linear import (
    dequantize,
    dequantize_torch,
    int_linear,
    int_linear_torch,
    prepare_int_linear,
)
from quire.kernels.int_table import candidates, few_candidates, grouped_candidates
from quire.kernels.moe import IntExpertWeights, experts_torch, moe_triton, prepare_moe, route_torch
from quire.kernels.moe_routing import Routing
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from quire.quantization.gguf_blocks import FORMATS
from quire.quantization.gguf_gpu import GGUFLinearMethod, pack_blocks
from tests.gguf_models import write_gguf_of, write_random_llama
from tests.gpu.test_int_linear import off, replayed_equals, tensor
from tests.kernels.int_cases import Layout, make_weight
from tests.models.test_gguf_families import FILES
from tests.quantization.blocks import Stored, random_blocks
from tests.quantization.test_gguf_gpu import k_m
from tests.quantization.test_gguf_linear import take
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
TYPES = list(FORMATS)
METHOD = GGUFLinearMethod(torch.bfloat16)
# Q4_1 and Q4_K; Q5_1 and Q5_K; Q6_K; Q5_0; Q8_0; Q4_0.
LAYOUTS = [
    Layout(4, 4096, 32, centres=True),
    Layout(8, 4096, 32, kind="int7", centres=True),
    Layout(8, 4096, 16, kind="int7"),
    Layout(8, 4096, 32, kind="int7"),
    Layout(8, 4096, 32),
    Layout(4, 4096, 32),
]
EXPERTS = (16, 4, 1024, 768)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_int_linear(CUDA)
    prepare_moe(CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_is_decoded_alike(type_name, dtype):
    blocks, _ = random_blocks(type_name, 200, 1024, size=0.01)
    there, here = (pack_blocks(type_name, blocks, dtype, device) for device in (CUDA, torch.device("cpu")))
    assert torch.equal(there.words.cpu(), here.words) and torch.equal(there.scales.cpu(), here.scales)
    assert torch.equal(dequantize(there), dequantize_torch(there))


@pytest.mark.parametrize("rows", [1, 2, 64, 256, 1000])
@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_in_a_graph(type_name, rows):
    """By the table: few rows, tiles, and those for which the weight is dequantized first."""
    layer = MergedColumnParallelLinear(2048, [512, 256], True, torch.bfloat16, CUDA, method=METHOD)
    stored = [random_blocks(type_name, outputs, 2048, outputs, size=0.01) for outputs in (512, 256)]
    slots = layer.load_slots()
    for shard in (0, 1):
        with slots.pop(("bias", shard)).opened() as view:
            view.normal_()
    for shard, (blocks, _) in enumerate(stored):
        assert slots["weight", shard].load_directly(Stored(type_name, blocks))
    layer.process_after_loading()
    assert len(layer.int_parts) == 1
    x, weight = tensor(rows, 2048), torch.cat([numbers for _, numbers in stored]).cuda()
    assert off(layer(x), x.float() @ weight.T + layer.bias.float()) < 1e-2
    replayed_equals(lambda: layer(x), rows)


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_types_that_differ_in_a_graph(rows):
    layer = QKVParallelLinear(1024, 64, 8, 4, False, torch.bfloat16, CUDA, method=METHOD)
    stored = [(s, t, random_blocks(t, n, 1024, n, size=0.01)) for s, t, n in
              (("q", "Q4_K", 512), ("k", "Q4_K", 256), ("v", "Q6_K", 256))]  # fmt: skip
    take(layer, *((shard, Stored(kind, blocks)) for shard, kind, (blocks, _) in stored))
    assert len(layer.int_parts) == 2 and METHOD.can_fuse(layer)
    x, weight = tensor(rows, 1024), torch.cat([numbers for *_, (_, numbers) in stored]).cuda()
    assert off(layer(x), x.float() @ weight.T) < 1e-2
    replayed_equals(lambda: layer(x), rows)
    if rows == 1:
        gain = torch.rand(1024, device="cuda") + 0.5
        normed = torch.nn.functional.rms_norm(x.float(), (1024,), gain, 1e-6)
        assert off(layer.fused(x, (gain, 1e-6)), normed @ weight.T) < 1e-2
        replayed_equals(lambda: layer.fused(x, (gain, 1e-6)), rows)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_embedding_and_head_in_a_graph(rows, type_name):
    vocab, hidden = 1003, 1024
    blocks, weight = random_blocks(type_name, vocab, hidden, size=0.01)
    embedding = VocabEmbedding(vocab, hidden, torch.bfloat16, CUDA, METHOD)
    assert embedding.load_slots()["weight", None].load_directly(Stored(type_name, blocks))
    head = LMHead(vocab, hidden, torch.bfloat16, CUDA, embedding, METHOD)
    head.process_after_loading()
    ids = torch.randint(vocab, (rows,), device="cuda")
    assert off(embedding(ids), weight.cuda()[ids]) < 4e-3
    replayed_equals(lambda: embedding(ids), "embedding")
    x = tensor(rows, hidden)
    assert off(head(x), x.float() @ weight.cuda().T) < 1e-2
    replayed_equals(lambda: head(x), "head")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, 64, 256])
def test_every_candidate(rows, layout):
    n = 4096
    weight, _ = make_weight(layout, n, torch.bfloat16, "cuda")
    x, bias = tensor(rows, layout.inputs), tensor(n)
    wanted = int_linear_torch(x, weight, bias)
    for config in candidates(rows, layout.inputs, n, weight.fields * weight.plane):
        got = int_linear(x, weight, bias, config=config)
        assert off(got, wanted) < 6e-3, config
        assert torch.equal(got, int_linear(x, weight, bias, config=config)), config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_fused(rows, layout, pdl):
    k, n = layout.inputs, 3072
    weight, _ = make_weight(layout, 2 * n, torch.bfloat16, "cuda")
    x, fused = tensor(rows, k), {"norm": (tensor(k).float(), 1e-6), "residual": tensor(rows, n), "silu": True}
    wanted = int_linear_torch(x, weight, **fused)
    for config in candidates(rows, k, n, weight.fields * weight.plane):
        assert off(int_linear(x, weight, config=config, pdl=pdl, **fused), wanted) < 1e-2, config


@pytest.mark.parametrize("rows", [1, 3, 64, 256, 2000])
def test_experts_of_two_types(rows):
    """Gate and up as in Q4_K, down as in Q6_K, as K_M files have them."""
    num_experts, top_k, hidden, width = EXPERTS
    gate_up, _ = make_weight(Layout(4, hidden, 32, centres=True), 2 * width, torch.bfloat16, "cuda", num_experts)
    down, _ = make_weight(Layout(8, width, 16, kind="int7"), hidden, torch.bfloat16, "cuda", num_experts)
    w = IntExpertWeights(gate_up, down)
    x, logits, residual = tensor(rows, hidden), tensor(rows, num_experts), tensor(rows, hidden)
    wanted = experts_torch(x, *route_torch(logits, Routing(top_k)), w.dequantized(), residual)
    few = few_candidates() if rows <= 3 else []
    for config in (None, *few, *grouped_candidates(rows, EXPERTS)):

        def run(config=config) -> torch.Tensor:
            return moe_triton(x, logits, w, Routing(top_k), residual=residual, config=config)

        assert off(run(), wanted) < 1e-2, config
        if rows in (1, 64, 256):
            replayed_equals(run, config)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe", "granite-moe", "gpt-oss"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4", "F16"])
def test_a_file_of_a_mixture(kind, family, tmp_path):
    """F16: experts without a kernel of their own are multiplied by the unquantized mixtures'."""
    reference = save_tiny(family, tmp_path)
    architecture, metadata, change = FILES[family]
    quantized = gguf.GGMLQuantizationType[kind]
    path = write_gguf_of(reference, tmp_path / "model.gguf", architecture, metadata, change, quantized)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 200 for j in range(3 + i)]} for i in range(5)]
    eager, logprobs = generated(path, prompts, dtype="bfloat16", enforce_eager=True)
    graphs, _ = generated(path, prompts, dtype="bfloat16")
    assert_mostly_equal(eager, graphs)
    _, wanted = generated(path, prompts, dtype="float32", quantization="dequantized")
    assert (logprobs - wanted).abs().median() < 0.05


PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 320 for j in range(3 + i)]} for i in range(5)]


def assert_mostly_equal(eager, graphs) -> None:
    """Steps of other sizes may round otherwise, and random models have near ties."""
    assert all(len(ids) == 12 for ids in (*eager, *graphs))
    assert sum(a == b for a, b in zip(eager, graphs, strict=True)) >= 3


def generated(path, prompts, **options):
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=128, kv_cache_memory_bytes=1 << 24, device="cuda",
              **options)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    try:
        found = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    logprobs = [next(iter(e.values())).logprob for one in found for e in one.prompt_logprobs if e is not None]
    return [list(one.outputs[0].token_ids) for one in found], torch.tensor(logprobs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M", "MXFP4", "IQ4_XS", "F16"])
def test_a_file_in_the_engine(kind, tmp_path):
    """The last two have no kernel, and become bfloat16."""
    path = write_random_llama(tmp_path / "model.gguf", k_m if kind == "Q4_K_M" else lambda name: kind)
    eager, logprobs = generated(path, PROMPTS, dtype="bfloat16", enforce_eager=True)
    graphs, _ = generated(path, PROMPTS, dtype="bfloat16")
    assert_mostly_equal(eager, graphs)
    _, wanted = generated(path, PROMPTS, dtype="float32", quantization="dequantized")
    assert (logprobs - wanted).abs().median() < 0.05
