"""Engines, their arguments and the tokenizer as vLLM's programs use them."""

import argparse
import asyncio
import dataclasses
from pathlib import Path

import pytest
from quire.outputs import RequestOutput
from quire.utils import FlexibleArgumentParser
from quire.v1.metrics.reader import Counter, Gauge, Histogram

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from quire.compat.unavailable import with_tokenization

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}
PROMPT = "The capital of Italy is"


def text_of(outputs):
    return outputs[0].outputs[0].text


def test_engine_args_from_flags():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(dtype="float32")
    args = EngineArgs.from_cli_args(parser.parse_args(["--max-model-len", "64", "--seed", "3"]))
    assert args.given() == {"dtype": "float32", "max_model_len": 64, "seed": 3} and args.enable_prefix_caching is True
    config = args.create_engine_config()
    assert config.model_config.max_model_len == 64 and config.model.dtype == "float32"
    assert dataclasses.replace(args, seed=4).seed == 4 and EngineArgs("folder").model == "folder"
    with pytest.raises(ValueError, match="max_model_len is 0"):
        EngineArgs(max_model_len=0).create_engine_config()
    plain = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert vars(plain.parse_args([])) == {}


def test_the_synchronous_engine_steps():
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    prompts = [(PROMPT, GREEDY), ("Two and two is", SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=4))]
    finished = {}
    for i, (prompt, params) in enumerate(prompts):
        assert engine.add_request(str(i), prompt, params) == str(i)
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert "Rome" in finished["0"].outputs[0].text and engine.get_num_unfinished_requests() == 0
    engine.add_request("gone", PROMPT, GREEDY)
    engine.abort_request(["gone"])
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="it must be a LoRARequest"):
        engine.add_request("x", PROMPT, GREEDY, lora_request=object())
    engine.engine_core.shutdown()


def test_the_asynchronous_engine_streams():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**SMALL))

    async def run() -> tuple[list[str], list[int]]:
        texts = []
        async for output in engine.generate(PROMPT, GREEDY, "a", trace_headers=None, session_id="s"):
            texts.append(output.outputs[0].text)
        with pytest.raises(ValueError, match="in another process"):
            await engine.collective_rpc(print)
        with pytest.raises(RuntimeError, match="torch_profiler_dir"):
            await engine.start_profile()
        with pytest.raises(ValueError, match="started without sleep mode"):
            await engine.sleep()
        return texts, await engine.collective_rpc("kv_cache_memory")

    try:
        texts, memory = asyncio.run(run())
        assert "Rome" in texts[-1] and all(texts[-1].startswith(text) for text in texts)
        assert len(memory) == 1 and memory[0] > 0
        assert engine.model_config.max_model_len == 128 and engine.is_running and not engine.errored
    finally:
        engine.shutdown()


def test_an_llm_of_engine_args():
    with LLM.from_engine_args(EngineArgs(**SMALL, enforce_eager=True)) as llm:
        assert llm.llm_engine.config.device.enforce_eager and llm.llm_engine.vllm_config is llm.llm_engine.config
        assert "Rome" in text_of(llm.generate(PROMPT, GREEDY, False))


def test_enqueued_requests_run_later(llm):
    direct = text_of(llm.generate(PROMPT, GREEDY, use_tqdm=False))
    first = llm.enqueue([PROMPT, "Rain is"], GREEDY)
    second = llm.enqueue_chat([{"role": "user", "content": "Hello"}], GREEDY)
    between = text_of(llm.generate(PROMPT, GREEDY, use_tqdm=False))
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert outputs[0].outputs[0].text == direct == between
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_prompts_as_vllms_dicts_and_other_arguments(llm):
    ids = llm.get_tokenizer().encode(PROMPT)
    prompt = TokensPrompt(prompt_token_ids=ids, multi_modal_data=None)
    shown = []
    outputs = llm.generate(prompt, GREEDY, lambda **options: shown.append(options) or FakeBar())
    assert "Rome" in text_of(outputs) and shown[0]["total"] == 1
    cut = llm.generate(PROMPT, GREEDY, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 2})[0]
    assert cut.prompt_token_ids == ids[-2:]
    with pytest.raises(ValueError, match="it must be a LoRARequest"):
        llm.generate(PROMPT, GREEDY, False, object())
    with pytest.raises(ValueError, match=r"tokenization_kwargs has \['padding'\]"):
        llm.generate(PROMPT, GREEDY, tokenization_kwargs={"padding": True})


def test_engines_take_the_same_tokenization_as_llm(llm):
    engine, ids = llm.llm_engine, llm.get_tokenizer().encode(PROMPT)
    asked = []

    def parse_many(prompts, add_special_tokens):
        asked.append(add_special_tokens)
        return engine.input_processor.parse_many(prompts, add_special_tokens)

    given = {"add_special_tokens": False, "truncate_prompt_tokens": 2}
    prompt, params = with_tokenization(PROMPT, GREEDY, given, parse_many)
    assert (prompt.token_ids, params.truncate_prompt_tokens, asked) == (ids, 2, [False])
    engine.add_request("special", PROMPT, GREEDY, tokenization_kwargs=given)
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].prompt_token_ids == ids[-2:]
    with pytest.raises(ValueError, match=r"\['padding'\]; allowed: truncate_prompt_tokens, add_special_tokens"):
        engine.add_request("wrong", PROMPT, GREEDY, tokenization_kwargs={"padding": True})


class FakeBar:
    def __init__(self):
        self.format_dict = {"elapsed": 1.0}

    def set_postfix_str(self, *_, **__): ...

    def update(self): ...

    def close(self): ...


@pytest.mark.parametrize("content_format", ["auto", "string", "openai"])
def test_chats_with_content_in_each_form(llm, content_format):
    text = [{"role": "user", "content": "Name a colour."}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]
    if content_format != "openai":  # the model's template takes no lists
        outputs = llm.chat([text, parts], GREEDY, False, None, None, None, content_format)
        assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    shows = "{% if messages[0].content is string %}a text{% else %}a list{% endif %}"
    outputs = llm.chat([text, parts], GREEDY, False, None, None, shows, content_format)
    assert [output.prompt for output in outputs] == ["a list" if content_format == "openai" else "a text"] * 2


def test_a_form_of_content_that_does_not_exist(llm):
    with pytest.raises(ValueError, match="chat_template_content_format is 'xml'; allowed: auto, string, openai"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, False, chat_template_content_format="xml")


def test_workers_and_their_model_can_be_called(llm):
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    assert llm.collective_rpc(lambda worker, factor: worker.rank + factor, args=(5,)) == [5]
    assert llm.get_world_size() == 1


def test_profiles_are_written(llm):
    folder = Path(llm.llm_engine.config.observability.profiler_config["torch_profiler_dir"])
    llm.start_profile("mine")
    with pytest.raises(RuntimeError, match="runs already"):
        llm.start_profile()
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.stop_profile()
    (trace,) = folder.glob("mine-rank0-*.pt.trace.json.gz")
    assert trace.stat().st_size > 1000
    with LLM(**SMALL) as without, pytest.raises(RuntimeError, match="torch_profiler_dir"):
        without.start_profile()


def test_the_model_config_is_resolved(llm):
    config = llm.llm_engine.model_config
    assert config.max_model_len == 256 and config.get_vocab_size() == config.hf_config.vocab_size
    assert config.hf_config.num_hidden_layers == config.hf_text_config["num_hidden_layers"] and config.seed == 0
    with pytest.raises(AttributeError, match="no_such"):
        assert config.hf_config.no_such


def test_metrics_have_vllms_classes(llm):
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    metrics = llm.get_metrics()
    assert {type(metric) for metric in metrics} == {Counter, Gauge, Histogram}
    assert any(metric.name.endswith("generation_tokens") and metric.value > 0 for metric in metrics)


def test_sampling_defaults_and_copies(llm):
    defaults = llm.get_default_sampling_params()
    defaults.max_tokens = 3
    copied = defaults.clone()
    copied.stop.append("x")
    assert defaults.stop == [] and copied.max_tokens == 3
    optional = SamplingParams.from_optional(n=None, temperature=None, max_tokens=None, logit_bias={"5": 200.0})
    assert (optional.n, optional.temperature, optional.max_tokens) == (1, 1.0, None)
    assert optional.logit_bias == {5: 100.0}
    optional.update_from_generation_config({"eos_token_id": [1, 2]}, eos_token_id=2)
    assert optional.all_stop_token_ids == {1, 2} and optional.eos_token_id == 2 and optional.stop_token_ids == [1]
    optional.verify(llm.llm_engine.model_config)
    with pytest.raises(ValueError, match="logit_bias is 9999999"):
        SamplingParams(logit_bias={9999999: 1.0}).verify(llm.llm_engine.model_config, None, None, None)
    assert SamplingParams.for_sampler_warmup().num_logprobs == 5
