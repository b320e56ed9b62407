"""Two ranks that share a GPU, each a thread: one samples, by fused kernels where it can, and the other follows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.executor.test_tensor_parallel import THREADS, row_states
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], [*range(3, 50)], [109, 110, 105, 106, 107] * 4, [4, 8, 15, 16, 23, 42]]
FUSED = [
    SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True, top_k=k)
    for t, k in ((0, 0), (0.8, 0), (1.0, 20), (0, 0))
]
UNFUSED = [SamplingParams(temperature=0.9, seed=5, max_tokens=24, repetition_penalty=1.2, logprobs=2)] * 4


def texts(model: Path, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """With the ranks' rows at the end. Collectives of threads cannot be captured."""
    fixed = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "enforce_eager": True}
    sizes = {"kv_cache_memory_bytes": 1 << 24, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    found = []
    with LLM(str(model), **(fixed | sizes | options)) as llm:
        for params in (FUSED, UNFUSED):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
            found += [list(one.outputs[0].token_ids) for one in outputs]
        rows = [tuple(part.cpu() for part in state) for state in llm.collective_rpc(row_states)]
    return found, rows


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "tests.spec_decode.proposers:Random"])
@pytest.mark.parametrize("family", ["llama"])  # threads would share the workspaces of experts: test_rank_processes.py
def test_two_ranks_say_what_one_says(tmp_path: Path, family: str, method: str | None) -> None:
    save_tiny(family, tmp_path)
    given: dict[str, Any] = {}
    if method is not None:
        drafts = {"model": str(tmp_path)} if method == "draft_model" else {}
        given = {"speculative_config": {"method": method, "num_speculative_tokens": 3} | drafts, "spec_adaptive": False}
    found, (first, second) = texts(tmp_path, distributed_executor_backend=THREADS[2], **given)
    assert found == texts(tmp_path)[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
