"""The table of flags, the request bodies, SamplingParams and LLM against an installed vLLM's: `make test-compat`."""

import argparse
import dataclasses
import inspect
import json
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-compat")

from vllm.config.cache import CacheDType
from vllm.config.model import ModelImpl, TokenizerMode
from vllm.config.parallel import DistributedExecutorBackend
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.llm import LLM as VllmLLM
from vllm.entrypoints.openai.chat_completion import protocol as vllm_chat
from vllm.entrypoints.openai.completion import protocol as vllm_completion
from vllm.entrypoints.serve.tokenize import protocol as vllm_tokenize
from vllm.envs import environment_variables
from vllm.model_executor.layers.quantization import QuantizationMethods
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from quire import LLM
from quire.compat.unavailable import METHODS
from quire.config import EngineConfig
from quire.config.device import ATTENTION_ALIASES
from quire.config.fields import flag
from quire.config.flags import engine_kwargs
from quire.config.server import ServerConfig, server_config
from quire.config.vllm.choices import to_come
from quire.config.vllm.table import TABLE
from quire.entrypoints.cli import serve
from quire.entrypoints.openai import openapi_responses as responses
from quire.entrypoints.openai import protocol
from quire.messages.sampling_params import SamplingParams
from scripts.compatibility_page import DIFFERENT, SAME_MEANING

NAMES = json.loads((Path(__file__).parent / "vllm_names.json").read_text())
ACTIONS = {a.dest: a for a in make_arg_parser(FlexibleArgumentParser())._actions if a.option_strings}
SWITCHES = (argparse.BooleanOptionalAction, argparse._StoreTrueAction)
# Flags and values that need another flag beside them, here as there.
TOGETHER = {"enable_log_outputs": "--enable-log-requests", "custom": "--fingerprint-value=mine"}
CONFIGS = (ServerConfig, *EngineConfig.parts().values())
OURS = {field.name: field.default for config in CONFIGS for field in dataclasses.fields(config)}


def answer(*words: str) -> str:
    """What our command line says to these words; nothing if it takes them."""
    try:
        args = serve.parser().parse(list(words))
        server_config(args)
        EngineConfig.from_kwargs(**engine_kwargs(args))
    except ValueError as error:
        return str(error)
    return ""


def is_known(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the words are taken, or refused with the name of a feature to come."""
    try:
        said = answer(*words)
    except SystemExit:
        said = capsys.readouterr().err
    return not said or "not available yet" in said


def plain(value: Any) -> Any:
    """A default as a command line or a JSON object has it."""
    if isinstance(value, Enum):
        return plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return sorted(value) if isinstance(value, set | frozenset) else list(value) if isinstance(value, tuple) else value


def test_the_committed_names_are_those_of_vllm() -> None:
    """CI, which has no vLLM, compares with the committed names."""
    flags = {flag(name): action.option_strings for name, action in ACTIONS.items()}
    assert NAMES["flags"].keys() == flags.keys()
    for name, others in NAMES["flags"].items():
        found = [word for word in flags[name] if word != name and not word.startswith("--no-")]
        assert sorted(found) == sorted(others)
    assert set(NAMES["engine_args"]) == {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(NAMES["LLM"]) == inspect.signature(VllmLLM).parameters.keys() - {"kwargs"}
    assert set(NAMES["env"]) == {name for name in environment_variables if name.startswith("VLLM_")}


@pytest.mark.parametrize("name", [name for name in ACTIONS if name not in ("help", "config")])
def test_every_spelling_and_choice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    action = ACTIONS[name]
    for word in action.option_strings:
        if isinstance(action, SWITCHES):
            beside = TOGETHER.get(name, "--port=1")
            assert is_known((word, beside), capsys), word
        for choice in action.choices or ():
            beside = TOGETHER.get(str(choice), "--port=1")
            assert is_known((word, str(choice), beside), capsys), f"{word} {choice}"


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("quantization", QuantizationMethods),
        ("kv_cache_dtype", CacheDType),
        ("tokenizer_mode", TokenizerMode),
        ("model_impl", ModelImpl),
    ],
)
def test_every_choice_that_is_no_choice_of_the_parser(
    name: str, choices: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for choice in typing.get_args(choices):
        assert is_known((flag(name), choice), capsys), choice


def test_every_executor_and_attention_backend() -> None:
    """What these two name is looked for when the engine starts."""
    for choice in typing.get_args(DistributedExecutorBackend):
        assert choice in ("uni", "mp", "ray", "external_launcher") or to_come("distributed_executor_backend", choice)
    for backend in AttentionBackendEnum:
        assert backend.name in ATTENTION_ALIASES or to_come("attention_backend", backend.name), backend.name


@pytest.mark.parametrize("name", [name for name in ACTIONS if name not in ("help", "model")])
def test_every_default_is_taken(name: str) -> None:
    """A command line that spells out vLLM's defaults asks for nothing that is to come."""
    action, value = ACTIONS[name], plain(ACTIONS[name].default)
    if value is None or value == argparse.SUPPRESS or (isinstance(action, argparse._StoreTrueAction)):
        return
    if isinstance(value, bool):
        words = [flag(name) if value else f"--no-{flag(name)[2:]}"]
    elif isinstance(value, list) and action.nargs == "+":
        words = [flag(name), *map(str, value)] if value else []
    else:
        words = [flag(name), value if isinstance(value, str) else json.dumps(value)]
    assert answer(*words) == ""


def test_every_default_that_differs_is_documented() -> None:
    differ = set()
    for name, action in ACTIONS.items():
        if TABLE[name].status == "works" and name in OURS and action.default != argparse.SUPPRESS:
            here, there = plain(OURS[name]), plain(action.default)
            if here != there and (here or there):
                differ.add(name)
    assert differ - SAME_MEANING == DIFFERENT.keys()


def test_defaults_of_engine_arguments_are_taken() -> None:
    for field in dataclasses.fields(EngineArgs):
        made = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        if field.name not in ("model", *SAME_MEANING):
            EngineConfig.from_kwargs(**{field.name: plain(made)})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (vllm_chat.ChatCompletionRequest, protocol.ChatRequest),
        (vllm_chat.BatchChatCompletionRequest, protocol.BatchChatRequest),
        (vllm_chat.StreamOptions, protocol.StreamOptions),
        (vllm_completion.CompletionRequest, protocol.CompletionRequest),
        (vllm_tokenize.TokenizeCompletionRequest, protocol.TokenizeRequest),
        (vllm_tokenize.TokenizeChatRequest, protocol.TokenizeRequest),
        (vllm_tokenize.DetokenizeRequest, protocol.DetokenizeRequest),
    ],
)
def test_every_field_of_requests(theirs: Any, ours: Any) -> None:
    assert not theirs.model_fields.keys() - set(ours.__struct_fields__)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (vllm_chat.ChatCompletionResponse, responses.ChatCompletion),
        (vllm_chat.ChatCompletionResponseChoice, responses.ChatChoice),
        (vllm_chat.ChatMessage, responses.ChatMessage),
        (vllm_chat.ChatCompletionLogProbs, responses.ChatLogprobs),
        (vllm_chat.ChatCompletionLogProbsContent, responses.ChatTokenLogprobs),
        (vllm_chat.ToolCall, responses.ToolCall),
        (vllm_chat.UsageInfo, responses.Usage),
        (vllm_chat.PerRequestMetrics, responses.RequestTimes),
        (vllm_completion.CompletionResponse, responses.Completion),
        (vllm_completion.CompletionResponseChoice, responses.CompletionChoice),
        (vllm_completion.CompletionLogProbs, responses.CompletionLogprobs),
        (vllm_tokenize.TokenizeResponse, responses.Tokens),
        (vllm_tokenize.DetokenizeResponse, responses.Text),
    ],
)
def test_every_field_of_responses(theirs: Any, ours: Any) -> None:
    """Of the schemas, against which another test validates real responses."""
    assert not theirs.model_fields.keys() - set(ours.__struct_fields__)


def test_sampling_params_have_the_same_order_and_defaults() -> None:
    theirs, ours = (inspect.signature(kind).parameters for kind in (VllmSamplingParams, SamplingParams))
    names = [name.replace("_bad_words_token_ids", "bad_words_token_ids") for name in theirs]
    assert names == list(ours)[: len(names)]
    default, other = VllmSamplingParams(), SamplingParams()
    derived = ("bad_words_token_ids", "skip_reading_prefix_cache")  # from other fields, and at other times
    for name in (name for name in names if not name.startswith("_") and name not in derived):
        assert plain(getattr(other, name)) == plain(getattr(default, name)), name


def test_llm_has_every_method_and_argument() -> None:
    for name in (name for name in dir(VllmLLM) if not name.startswith("_") and callable(getattr(VllmLLM, name))):
        if name in METHODS:
            continue
        theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (VllmLLM, LLM))
        assert not theirs.keys() - ours.keys(), name
        positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == list(ours)[: len(positional)], name
