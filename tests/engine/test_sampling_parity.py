"""Every sampling parameter through the whole engine, in float32, against transformers or a written-out reference."""

import os

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from tests.tiny_models import COMMON, prompts, save_tiny

VOCAB = COMMON["vocab_size"]
COUNT = 24
PROMPTS = prompts((3, 17, 40, 64))
EOS = 7

# One request each; batched with one another and with plain ones.
ASKING = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {5: 8.0, 6: -100.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3, 50, 51]},
    "min tokens": {"min_tokens": 10, "stop_token_ids": [5], "logit_bias": {5: 100.0}},
    "bad words": {"bad_words_token_ids": [[9], [11, 12]], "logit_bias": {9: 30.0, 11: 20.0, 12: 25.0}},
    "all of it": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 4.0}, "min_tokens": 4},
}
SETTINGS = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 16},
    "preemption": {"num_gpu_blocks_override": 14, "max_model_len": 128},
    "preemption at depth 2": {"num_gpu_blocks_override": 14, "max_model_len": 128, "async_depth": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    made = save_tiny("llama", folder, eos_token_id=EOS)
    made.folder = str(folder)
    return made


def engine(model, **arguments):
    return LLM(
        model.folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_logprobs=-1,
        **{"kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, **arguments},
    )


@torch.no_grad()
def reference(model, prompt, params: SamplingParams):
    """Greedy decoding with transformers' processors where it has them, in the engine's order."""
    lp = transformers.generation.logits_process
    stop_ids = [*([] if params.ignore_eos else [EOS]), *params.stop_token_ids]
    ids, out, logprobs = list(prompt), [], []
    past, feed = None, torch.tensor([prompt])
    while len(out) < params.max_tokens and not (out and out[-1] in stop_ids):
        result = model(feed, past_key_values=past, use_cache=True)
        past, scores = result.past_key_values, result.logits[:, -1].float()
        raw = scores.log_softmax(-1)[0]
        context = torch.tensor([ids])
        if params.logit_bias:
            bias = [[[token], value] for token, value in params.logit_bias.items()]
            scores = lp.SequenceBiasLogitsProcessor(bias)(context, scores)
        if params.repetition_penalty != 1:
            scores = lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(context, scores)
        for token in set(out):
            scores[0, token] -= params.frequency_penalty * out.count(token) + params.presence_penalty
        if params.allowed_token_ids:
            kept = scores[0, params.allowed_token_ids].clone()
            scores[:] = -torch.inf
            scores[0, params.allowed_token_ids] = kept
        if params.min_tokens and stop_ids:
            scores = lp.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stop_ids)(context, scores)
        if params.bad_words_token_ids:
            scores = lp.NoBadWordsLogitsProcessor(params.bad_words_token_ids)(context, scores)
        token = int(scores.argmax())
        out.append(token)
        ids.append(token)
        logprobs.append(float(raw[token]))
        feed = torch.tensor([[token]])
    return out, logprobs


@pytest.mark.parametrize("setting", SETTINGS)
def test_parameters_match_the_reference_in_a_mixed_batch(model, setting):
    cases = []
    for i, extra in enumerate([*ASKING.values(), *([{}] * len(ASKING))]):
        params = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=2, ignore_eos=not extra, **extra)
        cases.append((PROMPTS[i % len(PROMPTS)], params))
    with engine(model, **SETTINGS[setting]) as llm:
        outputs = llm.generate([p for p, _ in cases], [s for _, s in cases], use_tqdm=False)
        if "preemption" in setting:
            assert llm.llm_engine.stats.num_preemptions > 0
    for (prompt, params), output in zip(cases, outputs, strict=True):
        tokens, logprobs = reference(model, prompt, params)
        completion = output.outputs[0]
        assert completion.token_ids == tokens, params
        chosen = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert chosen == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("setting", SETTINGS)
def test_prompt_logprobs_equal_transformers(model, setting):
    asking = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=3)
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with engine(model, **SETTINGS[setting]) as llm:
        for _ in range(2):  # the second time the cache is warm, and must not be used
            both = llm.generate(PROMPTS + PROMPTS, [plain] * 4 + [asking] * 4, use_tqdm=False)
            for prompt, output in zip(PROMPTS, both[4:], strict=True):
                assert output.num_cached_tokens == 0
                scores = output.prompt_logprobs
                assert len(scores) == len(prompt) and scores[0] is None
                with torch.no_grad():
                    expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
                for i in range(1, len(prompt)):
                    entry = scores[i]
                    token = prompt[i]
                    assert entry[token].logprob == pytest.approx(float(expected[i - 1, token]), abs=1e-3)
                    assert entry[token].rank == int((expected[i - 1] > expected[i - 1, token]).sum()) + 1
                    top = expected[i - 1].topk(3).indices.tolist()
                    assert set(entry) == {token, *top}


def test_all_logprobs(model):
    with engine(model) as llm:
        (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2, logprobs=-1), use_tqdm=False)
    entry = output.outputs[0].logprobs[0]
    assert len(entry) == VOCAB
    assert sum(torch.tensor(e.logprob).exp() for e in entry.values()) == pytest.approx(1.0, abs=1e-3)


def test_n_shares_the_prompts_blocks_and_differs(model):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    with engine(model, async_scheduling=False) as llm:
        core = llm.llm_engine.client.core
        llm.llm_engine.add_request("four", PROMPTS[3], params)
        llm.llm_engine.step()
        llm.llm_engine.step()
        pool = core.scheduler.kv.pool
        shared = [block.ref for block in pool.blocks[1:] if block.ref]
        # 64 prompt tokens are four blocks, the last of which each sibling needs for itself; each writes on in a fifth
        # or soon will: the first has.
        assert sorted(shared, reverse=True)[:3] == [4, 4, 4]
        assert len(shared) == 3 + 4 + 1
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
        final = {c.index: c.token_ids for output in outputs for c in output.outputs}
        assert len({tuple(ids) for ids in final.values()}) == 4
        assert pool.num_free == pool.num_blocks
        (again,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
        assert [c.token_ids for c in again.outputs] == [final[i] for i in range(4)]


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch_of_32(model):
    def params(seed):
        return SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=seed, max_tokens=30, ignore_eos=True)

    with engine(model) as llm:
        alone = [llm.generate(PROMPTS[i % 4], params(i), use_tqdm=False)[0].outputs[0].token_ids for i in range(32)]
        batch = llm.generate([PROMPTS[i % 4] for i in range(32)], [params(i) for i in range(32)], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in batch] == alone
    assert len({tuple(ids) for ids in alone}) == 32


def test_repetition_has_its_own_finish_reason(model):
    params = SamplingParams(
        temperature=0,
        max_tokens=50,
        ignore_eos=True,
        allowed_token_ids=[4],
        repetition_detection={"max_pattern_size": 3, "min_count": 5},
    )
    with engine(model) as llm:
        completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert completion.finish_reason == "repetition" and completion.token_ids == [4] * 5


def test_truncated_prompts(model):
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=10)
    with engine(model) as llm:
        cut, whole = llm.generate([PROMPTS[3], PROMPTS[3][-10:]], params, use_tqdm=False)
        assert cut.prompt_token_ids == PROMPTS[3][-10:]
        assert cut.outputs[0].token_ids == whole.outputs[0].token_ids
        longest = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=-1)
        assert len(llm.generate([5] * 400, longest, use_tqdm=False)[0].prompt_token_ids) == 255


def resident_bytes() -> int:
    """Current, not peak: an earlier test may have been larger."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_thousand_requests_through_a_quarter_of_the_cache(model):
    import random

    r = random.Random(0)
    many = [[r.randrange(1, VOCAB) for _ in range(r.randint(1, 60))] for _ in range(2000)]
    params = [
        SamplingParams(temperature=r.choice([0, 1.0]), max_tokens=r.randint(1, 30), ignore_eos=True, seed=i)
        for i in range(2000)
    ]
    # 64 requests of up to 90 tokens want about 200 blocks at a time.
    with engine(model, num_gpu_blocks_override=50, max_model_len=128, max_num_seqs=64) as llm:
        first = llm.generate(many[:1000], params[:1000], use_tqdm=False)
        before = resident_bytes()
        second = llm.generate(many[1000:], params[1000:], use_tqdm=False)
        grown = resident_bytes() - before
        pool = llm.llm_engine.client.core.scheduler.kv.pool
        assert [len(o.outputs[0].token_ids) for o in first + second] == [p.max_tokens for p in params]
        assert llm.llm_engine.stats.num_preemptions > 10
        assert pool.num_free == pool.num_blocks and not llm.llm_engine.client.core.scheduler.requests
        assert grown < 20 << 20  # the second thousand needs no more memory than the first
