"""DSPy's programs: python dspy_predict.py URL."""

import contextlib
import sys
from typing import Any, Literal

import dspy
from dspy.utils.exceptions import AdapterParseError
from openai import OpenAI
from steps import run_steps

URL = sys.argv[1] + "/v1"
MODEL = OpenAI(base_url=URL, api_key="unused").models.list().data[0].id
OPTIONS: Any = {"api_base": URL, "api_key": "unused", "max_tokens": 64, "temperature": 0.0, "cache": False}
lm = dspy.LM(f"openai/{MODEL}", **OPTIONS)
dspy.configure(lm=lm)


class Sentiment(dspy.Signature):
    """Say whether a sentence is positive or negative."""

    sentence: str = dspy.InputField()
    sentiment: Literal["positive", "negative"] = dspy.OutputField()


def language_model() -> None:
    """dspy.LM called with a prompt and with messages"""
    assert lm("Hello!") and lm(messages=[{"role": "user", "content": "Hello!"}])
    assert lm.history[-1]["usage"]["completion_tokens"] > 0


def text_completion() -> None:
    """dspy.LM with model_type text"""
    plain = dspy.LM(f"openai/{MODEL}", model_type="text", **OPTIONS)
    assert plain("One, two,")


# DSPy sends a schema only to models of which it knows, or is told, that they follow one.
def declared() -> dspy.LM:
    access = dspy.lm15.AccessPolicy(provider="quire", base_url=URL)
    provider = dspy.lm15.ProviderDefinition.chat(access, compat=dspy.lm15.OpenAIChatCompat())
    supports = dspy.lm15.ModelSupport(function_calling=True, response_schema=True)
    dspy.lm15.register_provider(provider, supports=supports)
    return dspy.LM(f"quire/{MODEL}", **OPTIONS)


def predict() -> None:
    """Predict with the default adapter, which asks again for JSON where its own format was missed"""
    with dspy.context(lm=declared()):
        assert dspy.Predict(Sentiment)(sentence="I like it.").sentiment in ("positive", "negative")


def json_object() -> None:
    """the JSON adapter through LiteLLM: JSON mode"""
    through = dspy.LM(f"hosted_vllm/{MODEL}", engine="litellm", **OPTIONS)
    with dspy.context(lm=through, adapter=dspy.JSONAdapter()), contextlib.suppress(AdapterParseError):
        dspy.Predict(Sentiment)(sentence="I like it.")  # any object is valid, so a small model may miss the field
    assert through.history[-1]["kwargs"]["response_format"] == {"type": "json_object"}
    assert through.history[-1]["outputs"][0].lstrip().startswith("{")


def json_schema() -> None:
    """the JSON adapter with a provider declared to follow schemas: the signature is enforced by grammar"""
    with dspy.context(lm=declared(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Sentiment)(sentence="I like it.").sentiment in ("positive", "negative")


async def asynchronous() -> None:
    """acall"""
    with dspy.context(lm=declared(), adapter=dspy.JSONAdapter()):
        found = await dspy.Predict(Sentiment).acall(sentence="I hate it.")
    assert found.sentiment in ("positive", "negative")


async def stream() -> None:
    """streamify: the answer arrives in pieces"""
    listener = dspy.streaming.StreamListener(signature_field_name="sentiment")
    program = dspy.streamify(dspy.Predict(Sentiment), stream_listeners=[listener])
    with dspy.context(lm=declared(), adapter=dspy.JSONAdapter()):
        values = [value async for value in program(sentence="I like it.")]
    assert isinstance(values[-1], dspy.Prediction) and values[-1].sentiment in ("positive", "negative")
    assert len(values) > 1


run_steps((language_model, text_completion, predict, json_object, json_schema, asynchronous, stream))
