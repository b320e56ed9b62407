"""Ranks on a GPU: two that share one, over the host; and collectives of one rank in a graph."""

import ctypes
import json

import pytest
import torch

from quire import LLM, SamplingParams
from quire.bench.serve_child import free_port
from quire.distributed.layout import WorldLayout
from quire.distributed.world import World
from quire.layers.linear import RowParallelLinear
from quire.layers.parallel import TensorParallel
from tests.executor.test_external_launcher import torchrun
from tests.executor.test_multiproc import outputs, start
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], list(range(3, 40)), [209, 210, 105, 106, 107] * 4]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2),
]


SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 100,
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
}


def generate(model: str, **options) -> list[list[int]]:
    with LLM(model, dtype="float32", **SMALL, **options) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_two_ranks_that_share_a_gpu(tmp_path, monkeypatch, family, sizes):
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")
    save_tiny(family, tmp_path)
    assert generate(str(tmp_path), **sizes) == generate(str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_fused_layers_of_two_ranks_in_bf16(tmp_path, monkeypatch, family):
    """Each rank rounds its own summands, so texts may part where two tokens are about as likely."""
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")
    save_tiny(family, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    found = []
    for size in (1, 2):
        with LLM(str(tmp_path), dtype="bfloat16", tensor_parallel_size=size, **SMALL) as llm:
            (one,) = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
            tokens = list(one.outputs[0].token_ids)
            scores = [by_token[token].logprob for token, by_token in zip(tokens, one.outputs[0].logprobs, strict=True)]
            found.append((tokens, scores))
    (alone, scores), (together, other_scores) = found
    shared = next((i for i, pair in enumerate(zip(alone, together, strict=True)) if pair[0] != pair[1]), len(alone))
    assert shared >= 4
    assert scores[:shared] == pytest.approx(other_scores[:shared], abs=0.05)


def test_processes_of_torchrun_that_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")
    model = tmp_path / "model"
    model.mkdir()
    save_tiny("llama", model)
    llm = start(str(model))
    try:
        wanted = outputs(llm)
    finally:
        llm.shutdown()
    ended = torchrun(2, str(model), tmp_path, tensor_parallel_size=2)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [wanted]


def num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t()
    get_nodes = ctypes.CDLL(None).cuGraphGetNodes if hasattr(ctypes.CDLL(None), "cuGraphGetNodes") else None
    get_nodes = get_nodes or ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    assert get_nodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    return count.value


class Unskipped(TensorParallel):
    """Of one rank, which exchanges nevertheless. NCCL sums in place, for which one rank launches nothing; what it
    gathers is copied."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(self.group.all_reduce(x))


def test_collectives_are_part_of_a_graph():
    device = torch.device("cuda", torch.cuda.current_device())
    world = World.connect(0, WorldLayout(), f"tcp://127.0.0.1:{free_port()}", "nccl", 60, even_alone=True)
    try:
        assert world.tensor.capturable
        nodes, results, x = [], [], torch.randn(4, 64, device=device)
        for tp in (TensorParallel(), Unskipped(0, 1, world.tensor)):
            torch.manual_seed(0)
            layers = [RowParallelLinear(64, 64, False, torch.float32, device, tp) for _ in range(6)]
            for layer in layers:
                torch.nn.init.normal_(layer.weight)
                layer.process_after_loading()
            graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
            with torch.inference_mode(), torch.cuda.stream(stream):
                for layer in layers:
                    layer(x)
                graph.capture_begin()
                y = x
                for layer in layers:
                    y = layer(y)
                graph.capture_end()
            graph.instantiate()
            graph.replay()
            torch.cuda.synchronize()
            nodes.append(num_nodes(graph))
            results.append(y.clone())
        assert nodes[1] - nodes[0] == len(layers), nodes
        assert torch.equal(*results)
    finally:
        world.close()
