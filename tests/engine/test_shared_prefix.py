"""Requests that share a long prefix: on a CPU its keys are read once for all of them, with the same outputs."""

import random

import pytest

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.worker import model_runner
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


def answers(model, prompts, **arguments):
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 26, **arguments}
    with LLM(model, max_model_len=700, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    chosen = [
        [p[t].logprob for p, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)] for o in outputs
    ]
    return [o.outputs[0].token_ids for o in outputs], chosen


def test_the_same_outputs_as_row_by_row(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path, max_position_embeddings=1024)
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(5, 200) for _ in range(n)]  # noqa: E731
    prefix = ids(600)
    prompts = [prefix + ids(1 + 3 * i) for i in range(14)]
    lengths = []
    original = native.attention

    def watched(*args):
        lengths.append(args[-1])
        return original(*args)

    monkeypatch.setattr(native, "attention", watched)
    tokens, logprobs = answers(str(tmp_path), prompts, attention_backend="native")
    assert max(lengths) == 592  # whole blocks
    wanted, wanted_logprobs = answers(str(tmp_path), prompts, attention_backend="torch")
    assert tokens == wanted
    assert logprobs == [pytest.approx(row, abs=1e-3) for row in wanted_logprobs]
    lengths.clear()
    assert answers(str(tmp_path), prompts, attention_backend="native", disable_cascade_attn=True)[0] == tokens
    assert not any(lengths)
    monkeypatch.setattr(model_runner, "MIN_SHARED_PREFIX", 10**6)
    assert answers(str(tmp_path), prompts, attention_backend="native")[0] == tokens
    assert not any(lengths)
