"""Requests that do not generate: vectors equal those of transformers' hidden states, however they are computed."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams, SamplingParams
from quire.config import EngineConfig
from quire.engine.async_llm import PACE, AsyncLLM
from quire.engine.input_processor import ParsedPrompt
from quire.kernels import native
from quire.messages.requests import ErrorKind
from quire.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from tests.pooling import largest
from tests.pooling.references import ARGUMENTS, PoolingReference, assert_close, make_pooling_reference

FEW_BLOCKS = {"num_gpu_blocks_override": 10, "max_model_len": 136, "long_prefill_token_threshold": 8}
SETTINGS = {
    "all at once": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 7": {"max_num_batched_tokens": 7, "async_depth": 2},
    "depth 0": {"async_scheduling": False},
    "no prefix caching": {"enable_prefix_caching": False},
    "no chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "preemption": FEW_BLOCKS,
    "depth 2, preemption": {**FEW_BLOCKS, "async_depth": 2},
    "two at a time": {"max_num_seqs": 2},
    "native attention": {"attention_backend": "native" if native.library() else None, "max_num_batched_tokens": 40},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> PoolingReference:
    return make_pooling_reference("llama", tmp_path_factory.mktemp("llama"))


def engine(reference: PoolingReference, **arguments) -> LLM:
    return LLM(reference.path, **{**ARGUMENTS, **arguments})


def assert_idle(llm: LLM) -> None:
    state = llm.llm_engine.client.core.state()
    assert state["rows"] == state["requests"] == 0 and state["blocks_free"] == state["blocks"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_transformers(reference, setting):
    with engine(reference, **SETTINGS[setting]) as llm:
        for pooling_type in ("LAST", "MEAN", "CLS"):
            params = PoolingParams(pooling_type=pooling_type)
            assert_close(llm.encode(reference.prompts, params, use_tqdm=False), reference.vectors(pooling_type))
        assert ("preemption" in setting) == (llm.llm_engine.stats.num_preemptions > 0)
        assert_idle(llm)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_other_families(tmp_path, family):
    reference = make_pooling_reference(family, tmp_path)
    with engine(reference, max_num_batched_tokens=32) as llm:
        assert_close(llm.encode(reference.prompts, use_tqdm=False), reference.vectors("LAST"))
        shorter = PoolingParams(dimensions=16)
        assert_close(llm.encode(reference.prompts, shorter, use_tqdm=False), reference.vectors("LAST", 16))


def test_one_of_each_kind_in_one_step(reference):
    kinds = [("LAST", None, True), ("MEAN", 8, True), ("CLS", None, False), ("LAST", 8, False)]
    params = [PoolingParams(pooling_type=t, dimensions=d, use_activation=a) for t, d, a in kinds]
    prompts = [prompt for prompt in reference.prompts for _ in kinds]
    with engine(reference, max_num_seqs=64) as llm:
        outputs = llm.encode(prompts, params * len(reference.prompts), use_tqdm=False)
    for i, kind in enumerate(kinds):
        assert_close(outputs[i :: len(kinds)], reference.vectors(*kind))


def test_a_prefix_is_reused_where_the_method_allows(reference):
    longest = reference.prompts[5]
    with engine(reference) as llm:
        (cold,) = llm.encode([longest], use_tqdm=False)
        (warm,) = llm.encode([longest], use_tqdm=False)
        (mean,) = llm.encode([longest], PoolingParams(pooling_type="mean"), use_tqdm=False)
        (asked,) = llm.encode([longest], PoolingParams(skip_reading_prefix_cache=True), use_tqdm=False)
        (after,) = llm.generate([longest], GREEDY, use_tqdm=False)  # what pooling computed serves generation
    found = [output.num_cached_tokens for output in (cold, warm, mean, asked, after)]
    assert found == [0, 112, 0, 0, 112]
    assert_close([warm, asked, mean], [reference.vectors(t)[5] for t in ("LAST", "LAST", "MEAN")])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "async_depth": 2},
        {**FEW_BLOCKS, "async_depth": 2},
        {"spec_method": "tests.spec_decode.proposers:Fixed", "spec_tokens": 3, "spec_adaptive": False},
    ],
    ids=["plain", "chunks", "preemption", "drafts"],
)
def test_beside_requests_that_generate(reference, options):
    with engine(reference) as alone:
        expected = [o.outputs[0].token_ids for o in alone.generate(reference.prompts, GREEDY, use_tqdm=False)]
    with engine(reference, **options) as llm:
        add = llm.llm_engine.add_request
        done = {}
        for i, prompt in enumerate(reference.prompts):
            add(f"text {i}", prompt, GREEDY.replace(logprobs=1 if i % 2 else None))
            add(f"mean {i}", prompt, PoolingParams(pooling_type="MEAN"))
            add(f"last {i}", prompt, PoolingParams())
        while llm.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in llm.llm_engine.step()}
        assert (options.keys() >= FEW_BLOCKS.keys()) == (llm.llm_engine.stats.num_preemptions > 0)
        assert_idle(llm)
    assert [done[f"text {i}"].outputs[0].token_ids for i in range(len(expected))] == expected
    for kind in ("mean", "last"):
        assert_close([done[f"{kind} {i}"] for i in range(len(expected))], reference.vectors(kind.upper()))


def test_in_an_engine_process(reference):
    with engine(reference, multiprocess=True, max_num_batched_tokens=64) as llm:
        for pooling_type in ("LAST", "MEAN"):
            params = PoolingParams(pooling_type=pooling_type)
            assert_close(llm.encode(reference.prompts, params, use_tqdm=False), reference.vectors(pooling_type))
        outputs = llm.embed(reference.prompts, use_tqdm=False)
        assert [output.outputs.hidden_size for output in outputs] == [64] * len(reference.prompts)
        assert outputs[0].outputs.embedding == pytest.approx(reference.vectors("LAST")[0].tolist(), abs=1e-4)


def test_asynchronously(reference):
    async def scenario(llm: AsyncLLM) -> None:
        async def encode(i: int, name: str = "pool"):
            return [o async for o in llm.encode(reference.prompts[i], PoolingParams(), f"{name} {i}")]

        async def generate(i: int):
            return [o async for o in llm.generate(reference.prompts[i], GREEDY, f"text {i}")][-1]

        every = range(len(reference.prompts))
        found = await asyncio.gather(*(encode(i) for i in every), *(generate(i) for i in every))
        assert_close([one for (one,) in found[: len(every)]], reference.vectors("LAST"))
        assert all(len(output.outputs[0].token_ids) == 12 for output in found[len(every) :])
        with pytest.raises(ValueError, match="generate\\(\\) samples"):
            await anext(llm.encode([3], GREEDY, "wrong"))
        with pytest.raises(ValueError, match="encode\\(\\) pools"):
            await anext(llm.generate([3], PoolingParams(), "wrong"))
        await many_at_once(llm)
        waiting = asyncio.ensure_future(encode(5, "aborted"))
        while "aborted 5" not in llm.output_processor:
            await asyncio.sleep(0)
        await llm.abort(["aborted 5"])
        (aborted,) = await waiting
        assert aborted.finished and aborted.finish_reason == "abort" and not len(aborted.outputs.data)
        state = await llm.get_state()
        assert state["front_end"] == {"requests": 0, "streams": 0, "calls": 0}
        assert state["core"]["requests"] == 0

    async def many_at_once(llm: AsyncLLM) -> None:
        """Other tasks run while the prompts are prepared, before any is sent."""
        prompts = [ParsedPrompt(None, reference.prompts[4])] * 200
        ids = [f"many {i}" for i in range(len(prompts))]
        work = asyncio.ensure_future(llm.encode_many(prompts, PoolingParams(pooling_type="LAST"), ids))
        turns = 0
        while ids[-1] not in llm.output_processor:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 2 * (len(prompts) // PACE)
        assert_close(await work, [reference.vectors("LAST")[4]] * len(prompts))

    async def main() -> None:
        llm = AsyncLLM(EngineConfig.from_kwargs(model=reference.path, **ARGUMENTS))
        try:
            await asyncio.wait_for(scenario(llm), 120)
        finally:
            llm.shutdown()

    asyncio.run(main())


def test_an_aborted_prompt_leaves_nothing_behind(reference):
    with engine(reference, max_num_batched_tokens=16) as llm:
        for name in ("kept", "aborted"):
            llm.llm_engine.add_request(name, reference.prompts[5], PoolingParams(pooling_type="MEAN"))
        for _ in range(3):
            assert llm.llm_engine.step() == []
        llm.llm_engine.abort_request("aborted")
        done = []
        while llm.llm_engine.has_unfinished_requests():
            done += llm.llm_engine.step()
        assert_close(done, [reference.vectors("MEAN")[5]])
        # Its row's sums are gone too.
        (again,) = llm.encode([reference.prompts[4]], PoolingParams(pooling_type="MEAN"), use_tqdm=False)
        assert_close([again], [reference.vectors("MEAN")[4]])
        assert_idle(llm)


def test_a_prompt_may_fill_the_model_s_length(reference):
    prompt = reference.prompts[5]
    with engine(reference, max_model_len=len(prompt)) as llm:
        (full,) = llm.encode([prompt], use_tqdm=False)
        assert_close([full], [reference.vectors("LAST")[5]])
        together = [[*prompt, 9], prompt]
        with pytest.raises(ValueError, match=r"the prompt has 121 tokens; with max_model_len 120 .* at most 120$"):
            llm.encode(together, use_tqdm=False)
        cut, _ = llm.encode(together, truncate_prompt_tokens=-1, use_tqdm=False)
        assert cut.prompt_token_ids == prompt
        keyed, _ = llm.embed(together, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
        assert keyed.prompt_token_ids == prompt
        with pytest.raises(ValueError, match="it must be a LoRARequest"):
            llm.embed(prompt, lora_request=object())
        assert_close([cut], [reference.vectors("LAST")[5]])
        # A full row beside one that samples: nothing is appended where there is no room.
        llm.llm_engine.add_request("text", prompt[:60], GREEDY)
        llm.llm_engine.add_request("pool", prompt, PoolingParams(skip_reading_prefix_cache=True))
        done = {}
        while llm.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in llm.llm_engine.step()}
        assert_close([done["pool"]], [reference.vectors("LAST")[5]])


def test_a_method_registered_by_its_user(reference):
    largest.register()
    with engine(reference, max_num_batched_tokens=32) as llm:
        params = PoolingParams(pooling_type="largest", normalize=False)
        outputs = llm.encode(reference.prompts, params, use_tqdm=False)
    assert_close(outputs, reference.vectors("LARGEST", normalize=False))


def test_outputs_have_their_kinds(reference):
    """As programs of vLLM make them of what `encode` gives."""
    with engine(reference) as llm:
        (whole,) = llm.encode([3, 4, 5], use_tqdm=False)
        (each,) = llm.encode([3, 4, 5], pooling_task="token_embed", use_tqdm=False)
        (embedded,) = llm.embed([3, 4, 5], use_tqdm=False)
        with pytest.raises(ValueError, match="pooling_params have task 'token_embed', but 'embed' is asked for"):
            llm.embed([3, 4, 5], pooling_params=PoolingParams(task="token_embed"), use_tqdm=False)
    made = EmbeddingRequestOutput.from_base(whole)
    for output in (made, embedded):
        assert isinstance(output, EmbeddingRequestOutput) and isinstance(output, PoolingRequestOutput)
        assert output.outputs.embedding == pytest.approx(whole.outputs.data.tolist(), abs=1e-5)
        assert repr(output.outputs) == "EmbeddingOutput(hidden_size=64)"
        assert output.finished and output.prompt_token_ids == [3, 4, 5]
    for kind in (EmbeddingRequestOutput, ClassificationRequestOutput, ScoringRequestOutput):
        with pytest.raises(ValueError, match=r"shape (is )?\[3, 64\]"):
            kind.from_base(each)
    score = PoolingRequestOutput("1", PoolingOutput(np.float32([0.5])), [3], 0, True)
    assert ScoringRequestOutput.from_base(score).outputs.score == 0.5
    assert ClassificationRequestOutput.from_base(score).outputs.num_classes == 1


def test_wrong_input_is_refused(reference):
    with engine(reference) as llm:
        for wrong, message in (
            (lambda: llm.encode([3], GREEDY), "this takes PoolingParams, got SamplingParams; generate takes"),
            (lambda: llm.generate([3], PoolingParams()), "this takes SamplingParams, got PoolingParams; encode and"),
            (lambda: llm.generate([[3], [4]], [GREEDY, PoolingParams()]), "this takes SamplingParams"),
            (lambda: llm.encode([[3], [4]], [PoolingParams()]), "2 prompts but 1 pooling_params"),
            (lambda: llm.encode([3], pooling_task="rank"), "task is 'rank'; it must be None or one of: embed"),
            (lambda: llm.encode(None), "prompts is None; it must be a prompt, or a list of prompts"),
            (lambda: llm.embed([3], truncate_prompt_tokens=0), "truncate_prompt_tokens is 0; it must be"),
            (lambda: llm.encode([3], PoolingParams(pooling_type="best")), "pooling_type is 'BEST'.*LAST, MEAN, CLS"),
            (lambda: llm.encode([3], PoolingParams(dimensions=65)), "dimensions is 65; .* hidden size, here 64"),
            (lambda: llm.encode([[]]), "the prompt is empty"),
            (lambda: llm.encode({"prompt_token_ids": [3], "output_token_ids": [4]}), "output_token_ids are for"),
            (
                lambda: llm.encode([3], PoolingParams(pooling_type="MEAN", skip_reading_prefix_cache=False)),
                "MEAN needs every token",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                wrong()
        assert not llm.llm_engine.has_unfinished_requests()
        assert len(llm.encode([3], use_tqdm=False)) == len(llm.encode(np.array([3, 4]), use_tqdm=False)) == 1


def test_a_vector_with_nan_fails_its_request_alone(reference, tmp_path):
    poison = 7
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((type(tmp_path)(reference.path) / file).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path), **ARGUMENTS) as llm:
        good, bad, other = llm.encode([[3, 4, 5], [3, poison], [5, 6]], use_tqdm=False)
        assert [one.finish_reason for one in (good, bad, other)] == ["stop", "error", "stop"]
        assert "NaN" in bad.error and bad.error_kind == ErrorKind.NOT_A_NUMBER and not len(bad.outputs.data)
        assert_idle(llm)


def test_metrics_count_prompts(reference):
    with engine(reference) as llm:
        llm.encode(reference.prompts, use_tqdm=False)
        found = {metric.name: metric for metric in llm.get_metrics()}
    assert found["quire:prompt_tokens"].value == sum(map(len, reference.prompts))
    assert found["quire:generation_tokens"].value == 0
    assert found["quire:e2e_request_latency_seconds"].count == len(reference.prompts)
    assert found["quire:request_params_max_tokens"].count == 0


def test_a_result_does_not_change_when_the_next_step_runs(reference):
    """Replayed steps on a CPU leave their hidden states in one place."""
    with engine(reference) as llm:
        params = PoolingParams(use_activation=False)
        first = llm.encode(reference.prompts, params, use_tqdm=False)
        kept = [output.outputs.data.copy() for output in first]
        llm.encode([[5, 6, 7]], params, use_tqdm=False)
        for output, data in zip(first, kept, strict=True):
            assert np.array_equal(output.outputs.data, data)


def test_steps_run_while_requests_are_added(reference, monkeypatch):
    calls, given = [], reference.prompts * 3
    with engine(reference, max_num_batched_tokens=32) as llm:
        add, step = llm.llm_engine.add_request, llm.llm_engine.step
        monkeypatch.setattr(llm.llm_engine, "add_request", lambda *a, **k: calls.append("add") or add(*a, **k))
        monkeypatch.setattr(llm.llm_engine, "step", lambda: calls.append("step") or step())
        assert_close(llm.encode(given, use_tqdm=False), reference.vectors("LAST") * 3)
        assert calls.index("step") < len(reference.prompts) and calls.count("add") == len(given)
        calls.clear()
        for wrong, why in (([], "the prompt is empty"), ([3] * 300, "the prompt has 300 tokens")):
            with pytest.raises(ValueError, match=why):
                llm.encode([*given, wrong], use_tqdm=False)
        with pytest.raises(ValueError, match="dimensions is 65"):
            llm.encode([*given[:2], given[2]], [PoolingParams()] * 2 + [PoolingParams(dimensions=65)], use_tqdm=False)
        assert calls == []  # refused before any was added
        with pytest.raises(ValueError, match="token id 9999, out of vocabulary"):
            llm.encode([*given, [9999]], use_tqdm=False)
        assert "step" in calls
        while llm.llm_engine.client.core.has_unfinished():
            step()
        assert_idle(llm)
        assert_close(llm.encode(given, use_tqdm=False), reference.vectors("LAST") * 3)
