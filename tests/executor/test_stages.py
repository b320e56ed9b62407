"""Models split into stages, which must say what one worker says."""

import itertools
import re
from collections import Counter

import pytest

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.sampling_params import StructuredOutputsParams
from quire.worker.model_runner import ModelRunner
from tests.executor.stages import TracedWorker
from tests.executor.test_ranks import PARAMS, PROMPTS
from tests.spec_decode.proposers import KNOWN
from tests.structured_output.model import save_model
from tests.tiny_models import save_tiny

STEPS_THAT_WAIT = range(6, 30)
STAGES = "tests.executor.stages:"
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_batched_tokens": 32,
}


def start(model, layout=None, **options) -> LLM:
    backend = {} if layout is None else {"distributed_executor_backend": STAGES + layout}
    return LLM(str(model), **(OPTIONS | options | backend))


def generate(llm: LLM, prompts=PROMPTS, params=PARAMS):
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def outputs(model, layout=None, prompts=PROMPTS, params=PARAMS, **options):
    llm = start(model, layout, **options)
    try:
        return generate(llm, prompts, params)
    finally:
        llm.shutdown()


def tokens(found):
    return [list(one.token_ids) for request in found for one in request.outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_stages_say_what_one_worker_says(tmp_path, family):
    """Prompts in chunks, logprobs, penalties; tied heads, windows, a scaled embedding, learned positions, experts."""
    save_tiny(family, tmp_path)
    wanted = outputs(tmp_path)
    for layout in ("TwoStages", "FourStages"):
        found = outputs(tmp_path, layout)
        assert tokens(found) == tokens(wanted)
        for ours, theirs in zip(found[0].outputs[0].logprobs, wanted[0].outputs[0].logprobs, strict=True):
            assert {token: pytest.approx(one.logprob, abs=1e-3) for token, one in ours.items()} == {
                token: one.logprob for token, one in theirs.items()
            }


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return folder


SETTINGS = {
    "depth 0": {"async_scheduling": False},
    "depth 2": {"async_depth": 2},
    "whole prompts": {"max_num_batched_tokens": 256},
    "chunks of 5": {"long_prefill_token_threshold": 5},
    "few blocks": {"num_gpu_blocks_override": 6, "max_model_len": 64, "max_num_batched_tokens": 16},
    "two at a time": {"max_num_seqs": 2},
    "one at a time": {"max_num_seqs": 1},
    "no prefix caching": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_stages_at_any_setting(llama, settings):
    options = SETTINGS[settings]
    assert tokens(outputs(llama, "TwoStages", **options)) == tokens(outputs(llama, **options))


def test_requests_are_preempted_among_stages(llama):
    options = {"num_gpu_blocks_override": 7, "max_model_len": 64}
    prompts = [[5 + i, 6, 7] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = start(llama, "TwoStages", **options)
    try:
        found = generate(llm, prompts, params)
        assert llm.llm_engine.client.core.scheduler.num_preemptions > 0
    finally:
        llm.shutdown()
    assert tokens(found) == tokens(outputs(llama, None, prompts, params, **options))


def test_two_ranks_share_each_of_two_stages(llama):
    assert tokens(outputs(llama, "TwoByTwo")) == tokens(outputs(llama))


def test_several_completions_and_cached_prefixes(llama):
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)
    prompts = [list(range(3, 50)), list(range(3, 45)), [9, 8, 7]]
    wanted = outputs(llama, None, prompts, params)
    llm = start(llama, "TwoStages")
    try:
        assert tokens(generate(llm, prompts, params)) == tokens(wanted)
        again = generate(llm, prompts, params)
    finally:
        llm.shutdown()
    assert tokens(again) == tokens(wanted)
    assert [one.num_cached_tokens for one in again] == [32, 32, 0]


def test_outputs_of_stages_follow_grammars(tmp_path):
    model = save_model(tmp_path)
    form = StructuredOutputsParams(regex=r"[a-f]{3}\d{2}")
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=20, structured_outputs=form) for i in range(4)]
    free = SamplingParams(temperature=0, max_tokens=24)
    prompts = [[40, 50, 60, 70, 80 + i] for i in range(6)]
    options = {"skip_tokenizer_init": False}
    wanted = outputs(model, None, prompts, [*params, free, free], **options)
    found = outputs(model, "TwoStages", prompts, [*params, free, free], **options)
    assert tokens(found) == tokens(wanted)
    assert all(re.fullmatch(r"[a-f]{3}\d{2}", one.outputs[0].text) for one in found[:4])


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_steps_of_every_stage_are_replayed(llama):
    llm = start(llama, "FourStages", dtype="bfloat16")
    try:
        found = generate(llm)
        replays = [rank.worker.runner.recorded.replays for rank in llm.llm_engine.client.core.executor.ranks]
    finally:
        llm.shutdown()
    assert min(replays) == max(replays) > 16
    assert tokens(found) == tokens(outputs(llama, dtype="bfloat16"))


def test_each_stage_has_a_step_of_its_own_requests(llama, monkeypatch):
    """A row is not planned while its token is in flight; meanwhile the first stage has other rows."""

    def execute_model(worker, plan):
        if worker.world.stage == 1 and plan.step in STEPS_THAT_WAIT:
            worker.log.wait_for((0, "begins", plan.step + 1))
        execute(worker, plan)

    execute = TracedWorker.execute_model
    monkeypatch.setattr(TracedWorker, "execute_model", execute_model)
    llm = start(llama, "TwoStages", max_num_batched_tokens=64)
    executor = llm.llm_engine.client.core.executor
    try:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        generate(llm, [[5 + i, 6, 7] for i in range(8)], params)
    finally:
        llm.shutdown()
    decoding = [plan for plan in executor.plans if len(plan.rows) == plan.total_tokens]
    shares = Counter(len(plan.rows) for plan in decoding)
    assert shares.most_common(1)[0][0] == 4
    for before, after in itertools.pairwise(decoding):
        assert not set(before.rows) & set(after.rows)
    events = executor.log.events
    for step in STEPS_THAT_WAIT:
        assert events.index((0, "begins", step + 1)) < events.index((1, "begins", step))


def test_a_step_that_fails_on_one_stage_fails_alone(llama, monkeypatch):
    def broken(runner, pending):
        if 101 in [new.token_ids[0] for new in pending.plan.new_rows] and not runner.stages.is_first:
            raise RuntimeError("no such kernel")
        return forward(runner, pending)

    forward = ModelRunner._forward
    monkeypatch.setattr(ModelRunner, "_forward", broken)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for layout in ("TwoStages", "FourStages"):
        llm = start(llama, layout)
        try:
            (alone,) = generate(llm, [[5, 6, 7]], params)
            (failed,) = generate(llm, [[101, 6, 7]], params)
            again = generate(llm, [[5, 6, 7], [5, 6, 7, 8]], params)
        finally:
            llm.shutdown()
        assert failed.outputs[0].finish_reason == "error" and "no such kernel" in failed.error
        assert tokens(again)[0] == tokens([alone])[0]


def test_what_stages_cannot_do_is_refused(llama):
    with pytest.raises(ValueError, match="drafts by medusa cannot be used with several stages yet"):
        start(llama, "TwoStages", spec_method="medusa", spec_tokens=2, spec_model=str(llama))
    with pytest.raises(ValueError, match="transformers runs cannot be split into stages"):
        start(llama, "TwoStages", model_impl="transformers")


def test_more_stages_than_layers_are_refused(tmp_path):
    save_tiny("llama", tmp_path, num_hidden_layers=3)
    with pytest.raises(ValueError, match="a model of 3 layers cannot be split into 4 stages; use at most 3"):
        start(tmp_path, "FourStages")


@pytest.mark.parametrize("method", ["ngram", "tests.spec_decode.proposers:Fixed", "tests.spec_decode.proposers:Right"])
def test_drafts_go_back_to_all_stages(llama, method):
    params = [PARAMS[0], PARAMS[1], PARAMS[2], PARAMS[3]]
    wanted = outputs(llama, None, PROMPTS, params)
    KNOWN[:] = [prompt + ids for prompt, ids in zip(PROMPTS, tokens(wanted), strict=True)]
    for layout in ("TwoStages", "FourStages"):
        llm = start(llama, layout, spec_method=method, spec_tokens=3)
        try:
            assert tokens(generate(llm, PROMPTS, params)) == tokens(wanted)
            stats = llm.llm_engine.client.core.scheduler.drafts.stats
        finally:
            llm.shutdown()
        assert stats.num_draft_tokens > 0
        assert stats.num_accepted_tokens > 0 or not method.endswith("Right")


def test_layers_are_split_as_told(llama):
    split = {"pipeline_parallel_size": 2, "pipeline_layers": [1, 3]}
    llm = start(llama, "TwoStages", **split)
    try:
        found = generate(llm)
        layers = [sorted(rank.kv_cache_specs()) for rank in llm.llm_engine.client.core.executor.ranks]
    finally:
        llm.shutdown()
    assert layers == [[0], [1, 2, 3]]
    assert tokens(found) == tokens(outputs(llama))
    with pytest.raises(ValueError, match="pipeline_layers names 2 stages, pipeline_parallel_size is 3"):
        start(llama, pipeline_parallel_size=3, pipeline_layers=[1, 3])
    with pytest.raises(ValueError, match="split as 2,3; needed are 2 positive numbers"):
        start(llama, "TwoStages", pipeline_parallel_size=2, pipeline_layers=[2, 3])


def test_the_last_stage_pools(llama):
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    vectors = []
    for layout in (None, "TwoStages"):
        llm = start(llama, layout)
        try:
            vectors.append([one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)])
            assert tokens(generate(llm)) == tokens(outputs(llama))
        finally:
            llm.shutdown()
    for ours, theirs in zip(*vectors, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def broken(*_):
    raise RuntimeError("launch failed")


def break_stage(worker, stage):
    if worker.world.stage == stage:
        worker.runner._forward = broken


def mend(worker):
    worker.runner.__dict__.pop("_forward", None)


def test_stages_in_processes_of_their_own(llama):
    """They say what one worker says, also after a step has failed on any of them."""
    wanted = tokens(outputs(llama))
    llm = start(llama, pipeline_parallel_size=2)
    try:
        assert tokens(generate(llm)) == wanted
        for stage in (0, 1):
            llm.collective_rpc(break_stage, args=(stage,))
            (failed,) = generate(llm, [[5, 6, 8]], PARAMS[2])
            assert failed.outputs[0].finish_reason == "error" and "launch failed" in failed.error
            llm.collective_rpc(mend)
            assert tokens(generate(llm)) == wanted
    finally:
        llm.shutdown()
