"""vLLM 0.32's public names, as lists of names alone, against ours."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

import quire
from quire import LLM, CompletionOutput, RequestOutput, SamplingParams
from quire.compat.unavailable import METHODS
from quire.metrics.request import RequestMetrics
from quire.vllm_paths import UNAVAILABLE

NAMES = json.loads((Path(__file__).parent / "data" / "names.json").read_text())
# Of features to come, or of no meaning here
NO_STATS = {"is_watermarked", "is_watermark_skipped"}


@pytest.mark.parametrize("name", NAMES["exports"])
def test_every_top_level_name_is_there_or_says_what_it_waits_for(name):
    if name in UNAVAILABLE[""]:
        with pytest.raises(AttributeError, match=f"{name} is not available yet: {UNAVAILABLE[''][name]}"):
            getattr(quire, name)
    else:
        assert getattr(quire, name) is not None and name in quire.__all__


@pytest.mark.parametrize("name", NAMES["LLM"])
def test_every_method_of_llm_works_or_says_what_it_waits_for(llm, name):
    if name in METHODS and not hasattr(LLM, name):
        with pytest.raises(NotImplementedError, match=f"LLM.{name} is not available yet: {METHODS[name]}"):
            getattr(llm, name)()
    else:
        assert callable(getattr(LLM, name))


def test_sampling_parameters_are_vllms_in_its_order():
    ours = [name for name in SamplingParams.__struct_fields__ if name != "bad_words_token_ids"]
    theirs = [name for name in NAMES["SamplingParams"] if name != "_bad_words_token_ids"]  # a name of ours: no matter
    assert ours[: len(theirs)] == theirs
    assert [name for name in NAMES["SamplingParams_members"] if not hasattr(SamplingParams(), name)] == []


def test_sampling_parameters_take_positions():
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.7, None, 0.9, 40, 0.05, 7, "end", [3], True, 20, 1, 2, None)
    assert (params.n, params.top_p, params.top_k, params.seed, params.stop) == (2, 0.9, 40, 7, ["end"])
    assert (params.stop_token_ids, params.ignore_eos, params.max_tokens, params.logprobs) == ([3], True, 20, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("watermarking", True), ("routed_experts_prompt_start", 3), ("trace_decode_token_ids", [1, 2])],
)
def test_parameters_of_features_to_come_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is not available yet: "):
        SamplingParams(**{field: value})


def test_outputs_have_every_field():
    for ours, theirs in ((CompletionOutput, "CompletionOutput"), (RequestOutput, "RequestOutput")):
        names = [field.name for field in dataclasses.fields(ours)]
        assert names[: len(NAMES[theirs])] == NAMES[theirs]
    assert set(NAMES["RequestStateStats"]) - NO_STATS <= set(dir(RequestMetrics(0.0)))


@pytest.mark.parametrize(
    ("method", "order"),
    [
        (
            LLM.generate,
            "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs",
        ),
        (
            LLM.chat,
            "messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format "
            "add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs "
            "mm_processor_kwargs",
        ),
        (LLM.enqueue, "prompts sampling_params lora_request priority use_tqdm tokenization_kwargs mm_processor_kwargs"),
        (LLM.beam_search, "prompts params lora_request use_tqdm concurrency_limit"),
        (LLM.collective_rpc, "method timeout args kwargs"),
        (LLM.wait_for_completion, "output_type use_tqdm"),
        (LLM.reset_prefix_cache, "reset_running_requests reset_connector"),
        (
            quire.LLMEngine.add_request,
            "request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers priority session_id "
            "prompt_text",
        ),
    ],
)
def test_arguments_are_in_vllms_order(method, order):
    assert list(inspect.signature(method).parameters)[1:] == order.split()
