"""Executors by name, and models shared by two ranks, which must say what one rank says."""

import pytest
import torch
import torch.nn.functional as F

from quire import LLM, SamplingParams
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.config import EngineConfig
from quire.executor.factory import make_executor
from quire.kernels.rms_norm import rms_norm_torch
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.llama import LlamaForCausalLM
from quire.models.loading.weight_loader import load_weights
from quire.models.mixtral import MixtralForCausalLM
from quire.models.options import ModelOptions
from quire.quantization.fused_linear import FusedLinearMixin
from tests.executor.threads import ThreadsExecutor, on_every_rank
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}}
THREADS = "tests.executor.threads:ThreadsExecutor"
PROMPTS = [[5, 6, 7], list(range(3, 40)), [209, 210, 105, 106, 107] * 4, [4, 8, 15, 16, 23, 42]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=12, repetition_penalty=1.3),
]


def outputs(model, **options):
    memory = {"kv_cache_memory_bytes": 1 << 22, "max_num_batched_tokens": 32}
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=128, dtype="float32", **memory, **options)
    try:
        if options:
            assert isinstance(llm.llm_engine.client.core.executor, ThreadsExecutor)
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    finally:
        llm.shutdown()
    return [one.outputs[0] for one in found]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3-moe"])
def test_two_ranks_say_what_one_says(tmp_path, family):
    """Tied and untied heads, biases, a scaled embedding, experts; the vocabulary of 211 does not divide."""
    save_tiny(family, tmp_path)
    wanted = outputs(str(tmp_path))
    found = outputs(str(tmp_path), distributed_executor_backend=THREADS)
    for ours, theirs in zip(found, wanted, strict=True):
        assert list(ours.token_ids) == list(theirs.token_ids)
    for ours, theirs in zip(found[0].logprobs, wanted[0].logprobs, strict=True):
        assert {token: pytest.approx(one.logprob, abs=1e-3) for token, one in ours.items()} == {
            token: one.logprob for token, one in theirs.items()
        }


def test_two_ranks_measure_the_same_steps(tmp_path):
    """Adaptive drafts: each rank times steps in which the other takes part."""
    save_tiny("llama", tmp_path)
    drafts = {"spec_method": "tests.spec_decode.proposers:Fixed", "spec_tokens": 2, "max_num_seqs": 4}
    found = outputs(str(tmp_path), distributed_executor_backend=THREADS, **drafts)
    for ours, theirs in zip(found, outputs(str(tmp_path)), strict=True):
        assert list(ours.token_ids) == list(theirs.token_ids)


def test_shards_of_a_checkpoint_compute_what_the_whole_does(tmp_path):
    reference = save_tiny("llama", tmp_path, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    hf = reference.config.to_dict()
    ids, heads = torch.tensor([0, 105, 106, 210, 7]), torch.randn(5, 64)

    def parts(tp: TensorParallel):
        model = LlamaForCausalLM(hf, ModelOptions(torch.float32, CPU, tp))
        load_weights(model, open_tensors(resolve_model(str(tmp_path))))
        layer = model.layers[1]
        x = model.embed_tokens(ids)
        widths = (tp.share(64, "heads"), tp.share(96, "width"))
        mine = [slice(width * tp.rank, width * (tp.rank + 1)) for width in widths]
        out = layer.self_attn.o_proj(heads[:, mine[0]].contiguous())
        inner = layer.mlp.up_proj(x).unflatten(1, (2, -1)).prod(1)
        qkv = layer.self_attn.qkv_proj(x)
        assert isinstance(layer.self_attn.qkv_proj, QKVParallelLinear)
        assert isinstance(layer.mlp.up_proj, MergedColumnParallelLinear)
        assert isinstance(layer.mlp.down_proj, RowParallelLinear)
        assert len(model.embed_tokens.weight) == len(model.lm_head.weight) == model.lm_head.rows.size
        return x, out, layer.mlp.down_proj(inner), model.lm_head(heads), qkv.shape[1]

    *wanted, width = parts(SINGLE)
    torch.testing.assert_close(wanted[0], reference.model.embed_tokens(ids).detach())
    ranks = on_every_rank(parts)
    for *found, half in ranks:
        assert half == width // 2
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_fused_layers_add_residual_and_bias_once(tmp_path, monkeypatch):
    """By the kernels' plain versions: linears with norm, activation and residual, and the same of experts."""

    def apply_fused(self, layer, x, bias, norm=None, residual=None, silu=False):
        out = F.linear(x if norm is None else rms_norm_torch(x, *norm), layer.weight, bias)
        out = F.silu(out.chunk(2, 1)[0]) * out.chunk(2, 1)[1] if silu else out
        return out if residual is None else out + residual

    monkeypatch.setattr(FusedLinearMixin, "apply_fused", apply_fused)
    dense, sparse = (save_tiny(f, tmp_path / f, **BIASES.get(f, {})).config.to_dict() for f in ("llama", "mixtral"))
    stream, heads = torch.randn(5, 64), torch.randn(5, 64)

    def parts(tp: TensorParallel):
        options = ModelOptions(torch.float32, CPU, tp, moe_backend="torch")
        llama, mixtral = LlamaForCausalLM(dense, options), MixtralForCausalLM(sparse, options)
        for model, family in ((llama, "llama"), (mixtral, "mixtral")):
            load_weights(model, open_tensors(resolve_model(str(tmp_path / family))))
        layer, width = llama.layers[1], tp.share(64, "heads")
        mine = heads[:, width * tp.rank : width * (tp.rank + 1)].contiguous()
        norm = layer.mlp_norm.params
        return (
            layer.self_attn.o_proj.fused(mine, residual=stream),
            layer.mlp.forward_fused(stream, norm),
            mixtral.layers[1].mlp.forward_fused(stream, norm),
        )

    wanted = parts(SINGLE)
    for found in on_every_rank(parts):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_tied_head_is_compared_with_the_shard_of_the_embedding(tmp_path):
    reference = save_tiny("llama", tmp_path, tie_word_embeddings=False)
    hf = reference.config.to_dict() | {"tie_word_embeddings": True}

    def load(tp: TensorParallel) -> None:
        model = LlamaForCausalLM(hf, ModelOptions(torch.float32, CPU, tp))
        load_weights(model, open_tensors(resolve_model(str(tmp_path))))

    with pytest.raises(ValueError, match="differs from the embedding"):
        on_every_rank(load)
    with torch.no_grad():
        reference.lm_head.weight.copy_(reference.model.embed_tokens.weight)
    reference.save_pretrained(tmp_path)
    on_every_rank(load)


def test_a_vocabulary_that_leaves_a_rank_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"vocabulary \(5\) cannot be divided among 4"):
        VocabEmbedding(5, 8, torch.float32, CPU, tp=TensorParallel(1, 4))


def test_ranks_that_are_not_connected_say_so():
    head = LMHead(8, 4, torch.float32, CPU, tp=TensorParallel(0, 2))
    with pytest.raises(RuntimeError, match="not connected"):
        head(torch.zeros(1, 4))


def test_data_parallelism_is_not_available():
    assert EngineConfig.from_kwargs(data_parallel_size=1).parallel.data_parallel_size == 1
    with pytest.raises(ValueError, match="not available yet: data parallelism; data_parallel_size is 2"):
        EngineConfig.from_kwargs(data_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("threads", "allowed: uni, mp, ray, external_launcher, or your own as 'module:Class'"),
        ("no.such:Class", "cannot be imported"),
    ],
)
def test_an_unknown_executor_is_explained(name, message):
    with pytest.raises(ValueError, match=message):
        make_executor(EngineConfig.from_kwargs(distributed_executor_backend=name))


def test_more_stages_than_layers_are_refused_before_anything_is_started(tmp_path):
    save_tiny("llama", tmp_path)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size is 99, but the model has 4 layers; allowed: 1 to 4"):
        outputs(str(tmp_path), pipeline_parallel_size=99)
