import pytest

from quire import LLM, SamplingParams
from quire.messages.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=256, kv_cache_memory_bytes=1 << 27, scheduling_policy="priority") as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_prompts_of_every_form(llm):
    text = "The capital of Italy is"
    ids = llm.get_tokenizer().encode(text)
    outputs = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert len(set(texts(outputs))) == 1 and "Rome" in texts(outputs)[0]
    assert [o.prompt for o in outputs] == [text, None, text, None]
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert texts(llm.generate(text, GREEDY, use_tqdm=False)) == texts(llm.generate(ids, GREEDY, use_tqdm=False))


def test_outputs_come_in_order_with_each_prompts_own_parameters(llm):
    lengths = [9, 1, 5]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["a b c", "1 2 3", "x y z"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.prompt for o in outputs] == ["a b c", "1 2 3", "x y z"]
    assert llm.generate([], GREEDY) == []


def test_seeds_repeat_and_n_differs(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, n=4, ignore_eos=True)
    first, second = (llm.generate("Once upon a time", params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert [c.text for c in first.outputs] == [c.text for c in second.outputs]
    assert len({c.text for c in first.outputs}) == 4
    unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len(set(texts(llm.generate(["Once upon a time"] * 3, unseeded, use_tqdm=False)))) == 3


def test_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    completion = llm.generate("The capital of Italy is", params, use_tqdm=False)[0].outputs[0]
    assert len(completion.logprobs) == 5
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2
        assert sorted((e.logprob for e in entry.values()), reverse=True) == [e.logprob for e in entry.values()]
    assert completion.logprobs[0][completion.token_ids[0]].decoded_token == " Rome"
    chosen = sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(chosen)


def test_metrics_and_cached_tokens(llm):
    llm.reset_prefix_cache()
    prompt = "word " * 40
    cold, warm = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16
    m = warm.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.last_token_time <= m.finished_time
    assert m.num_generation_tokens == len(warm.outputs[0].token_ids)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_engine_streams_by_output_kind(llm, kind):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, output_kind=kind)
    engine, got = llm.llm_engine, []
    engine.add_request("stream", "Rain is", params)
    while engine.has_unfinished_requests():
        got += engine.step()
    final = llm.generate("Rain is", params, use_tqdm=False)[0].outputs[0]
    assert [o.finished for o in got] == [False] * (len(got) - 1) + [True]
    parts = [o.outputs[0] for o in got]
    if kind == RequestOutputKind.DELTA:
        assert (
            "".join(p.text for p in parts) == final.text and [t for p in parts for t in p.token_ids] == final.token_ids
        )
    else:
        assert parts[-1].text == final.text and parts[-1].token_ids == final.token_ids
        assert len(parts) == (1 if kind == RequestOutputKind.FINAL_ONLY else 10)


def test_priorities_and_aborts(llm):
    engine = llm.llm_engine
    engine.add_request("a", "one", GREEDY)
    engine.add_request("b", "two", GREEDY, priority=-1)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", "one", GREEDY)
    engine.step()
    engine.abort_request(["a", "never there"])
    done = set()
    while engine.has_unfinished_requests():
        done |= {o.request_id for o in engine.step() if o.finished}
    assert done == {"b"}


WRONG_PROMPTS = {
    "the prompt is empty": "",
    "the prompt is empty; it must": [],
    "at most 255": [5] * 256,
    "token id 49152": [1, 49152],
    "token id -1": {"prompt_token_ids": [-1]},
    "unknown keys": {"promt": "x"},
    "lacks prompt": {"cache_salt": "x"},
    "a prompt is a string": 3.5,
}


@pytest.mark.parametrize("message", WRONG_PROMPTS)
def test_an_invalid_prompt_is_named_and_affects_no_other(llm, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", WRONG_PROMPTS[message]], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert "Rome" in texts(llm.generate(["The capital of Italy is"], GREEDY, use_tqdm=False))[0]


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("temperature is -1", {"temperature": -1}),
        ("temperature must be a finite number", {"temperature": float("nan")}),
        ("top_p is 2", {"top_p": 2}),
        ("top_p is 0", {"top_p": 0}),
        ("top_k is -2", {"top_k": -2}),
        ("top_k is 1.5", {"top_k": 1.5}),
        ("min_p is 1.1", {"min_p": 1.1}),
        ("max_tokens is 0", {"max_tokens": 0}),
        ("n is 0", {"n": 0}),
        ("n is 2 with temperature 0", {"n": 2, "temperature": 0}),
        ("logprobs is -2", {"logprobs": -2}),
        ("stop_token_ids", {"stop_token_ids": [-5]}),
        ("stop_token_ids has 300", {"stop_token_ids": list(range(300))}),
        ("top_k is", {"top_k": 2**63}),
        ("temperature is 1e", {"temperature": 1e39}),
        ("repetition_penalty is 0", {"repetition_penalty": 0}),
        ("presence_penalty is 3", {"presence_penalty": 3}),
        ("min_tokens is 20", {"min_tokens": 20, "max_tokens": 10}),
        ("stop has an entry of 1000000 characters; at most 1024", {"stop": "x" * 1_000_000}),
        ("stop has ''", {"stop": [""]}),
        ("stop is 5; it must be a list", {"stop": 5}),
        ("need detokenize", {"stop": "x", "detokenize": False}),
        ("allowed_token_ids is 5", {"allowed_token_ids": 5}),
        ("allowed_token_ids is \\[\\]", {"allowed_token_ids": []}),
        ("logit_bias is \\[1\\]", {"logit_bias": [1]}),
        ("logit_bias is 1.9", {"logit_bias": {1.9: 5}}),
        ("logit_bias is 101", {"logit_bias": {1: 101}}),
        ("logit_bias must be a finite", {"logit_bias": {1: float("nan")}}),
        ("truncate_prompt_tokens is 0", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens is 2.0", {"truncate_prompt_tokens": 2.0}),
        ("output_kind is 'delta'", {"output_kind": "delta"}),
        ("max_pattern_size is 0", {"repetition_detection": {"max_pattern_size": 0}}),
    ],
)
def test_wrong_parameters_say_what_is_allowed(message, values):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_limits_of_the_engine(llm):
    with pytest.raises(ValueError, match="at most 20 are allowed"):
        llm.generate("x", SamplingParams(logprobs=21))
    with pytest.raises(ValueError, match="stop_token_ids has token id 49152"):
        llm.generate("x", SamplingParams(stop_token_ids=[49152]))
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate(["x", "y"], [GREEDY])
    with pytest.raises(TypeError, match="tempreture"):
        SamplingParams(tempreture=1)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("did you mean 'max_model_len'", {"max_modellen": 5}),
        ("dtype is 'int3'; allowed", {"dtype": "int3"}),
        ("has positions for 8192", {"max_model_len": 10_000}),
        ("the longest that fits is 32", {"num_gpu_blocks_override": 2, "max_model_len": 100}),
        ("without chunked prefill", {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}),
        ("unknown attention backend", {"attention_backend": "magic"}),
        ("less than two blocks", {"kv_cache_memory_bytes": 1000}),
        ("no/such/model", {"model": "no/such/model"}),
    ],
)
def test_wrong_engine_arguments(message, arguments):
    with pytest.raises(ValueError, match=message):
        LLM(**{"kv_cache_memory_bytes": 1 << 26, **arguments})


def test_a_smaller_cache_lowers_the_default_length(caplog):
    with LLM(num_gpu_blocks_override=10) as llm:
        assert llm.llm_engine.max_model_len == 160
    assert "lowered from 8192 to 160" in caplog.text


def test_a_failing_step_ends_its_requests_and_the_engine_keeps_running(llm, monkeypatch):
    runner = llm.llm_engine.client.core.executor.worker.runner

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "compute_logits", broken)
        outputs = llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
    assert all("out of memory" in o.error for o in outputs)
    assert "Rome" in texts(llm.generate("The capital of Italy is", GREEDY, use_tqdm=False))[0]


def test_an_interrupt_ends_the_call_and_leaves_the_engine_usable(llm, monkeypatch):
    import os
    import signal

    steps = []
    step = llm.llm_engine.step

    def interrupted_step():
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests() and len(steps) == 3
    assert "Rome" in texts(llm.generate("The capital of Italy is", GREEDY, use_tqdm=False))[0]


def test_stop_tokens_stay_out_of_the_text(llm):
    ids = llm.generate("The sky is", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    tokenizer = llm.get_tokenizer()
    for include, shown in ((False, ids[:3]), (True, ids[:4])):
        params = SamplingParams(
            temperature=0, max_tokens=8, stop_token_ids=[ids[3]], include_stop_str_in_output=include
        )
        completion = llm.generate("The sky is", params, use_tqdm=False)[0].outputs[0]
        assert completion.token_ids == ids[:4] and completion.stop_reason == ids[3]
        assert completion.text == tokenizer.decode(shown)


def test_stop_strings(llm):
    whole = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0].text
    stop = whole[9:13]
    completion = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=20, stop=stop), use_tqdm=False)[0]
    assert completion.outputs[0].text == whole[: whole.index(stop)]
    assert completion.outputs[0].finish_reason == "stop" and completion.outputs[0].stop_reason == stop


def test_bad_words(llm):
    params = SamplingParams(temperature=0, max_tokens=12, bad_words=["Rome"])
    (output,) = llm.generate("The capital of Italy is", params, use_tqdm=False)
    assert "Rome" not in output.outputs[0].text


def test_an_id_like_a_siblings_and_a_refused_request_leak_nothing(llm):
    engine = llm.llm_engine
    engine.add_request("a", "one", SamplingParams(n=2, max_tokens=3))
    engine.add_request("a#1", "one", SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="cache_salt is 5"):
        engine.add_request("b", {"prompt": "x", "cache_salt": 5}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()


def test_a_script_without_shutdown_exits_cleanly(tmp_path):
    """A plan is still in flight after a stop string, and nobody calls shutdown()."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "from quire import LLM, SamplingParams\n"
        "llm = LLM(kv_cache_memory_bytes=1 << 27, max_model_len=256)\n"
        "print(llm.generate('The sky is', SamplingParams(temperature=0, max_tokens=50, stop=[',']), use_tqdm=False))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "terminate" not in done.stderr


def test_an_unreferenced_engine_is_collected():
    import gc
    import threading
    import weakref

    before = set(threading.enumerate())
    made = LLM(kv_cache_memory_bytes=1 << 27, max_model_len=256)
    model = weakref.ref(made.llm_engine.client.core.executor.worker.model)
    made.generate("x", GREEDY, use_tqdm=False)
    started = set(threading.enumerate()) - before
    del made
    gc.collect()
    assert model() is None and started and not any(thread.is_alive() for thread in started)
    with pytest.raises(ValueError, match="longest that fits"):
        LLM(num_gpu_blocks_override=2, max_model_len=100)
    gc.collect()
    assert not set(threading.enumerate()) - before


def values_of(llm):
    """Metrics by name and labels, without that of the engine, which is one."""
    return {(m.name, *(v for k, v in m.labels.items() if k != "engine")): m for m in llm.get_metrics()}


def test_engine_metrics(llm):
    before = values_of(llm)
    llm.generate(["a b c"] * 2, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    after = values_of(llm)
    name = "SmolLM2-135M-Instruct"
    key = ("quire:generation_tokens", name)
    assert after[key].value - before[key].value == 10
    key = ("quire:request_success", name, "length")
    assert after[key].value - before[key].value == 2
    assert after[("quire:num_requests_running", name)].value == 0
    assert after[("quire:time_to_first_token_seconds", name)].count >= 2
    for phase in ("queue", "prefill", "decode", "inference"):
        key = (f"quire:request_{phase}_time_seconds", name)
        assert after[key].count - before[key].count == 2 and after[key].sum > before[key].sum
    key = ("quire:inter_token_latency_seconds", name)
    assert after[key].count - before[key].count == 8
    key = ("quire:iteration_tokens_total", name)
    assert after[key].sum > before[key].sum
    (info,) = (m for m in llm.get_metrics() if m.name == "quire:cache_config_info")
    assert int(info.labels["num_gpu_blocks"]) > 0
