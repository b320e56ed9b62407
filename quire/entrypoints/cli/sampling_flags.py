"""Sampling parameters on the command line: every field of SamplingParams has a flag, so a new one needs no edit."""

import argparse
import difflib
import json
import typing
from typing import Any

import msgspec

from quire.config.flags import integer, number
from quire.messages.sampling_params import SamplingParams

# Set by the program, never by its user.
NOT_FOR_USERS = {"output_kind", "detokenize", "bad_words_token_ids", "visible_token_ids", "reasoning"}
NOT_FOR_USERS |= {"thinking_token_budget"}  # needs a server's reasoning parser
# The engine's flag is enough, or vLLM's alone.
NOT_FOR_USERS |= {
    "stream_interval",
    "flat_logprobs",
    "watermarking",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
}
SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
HELP = {
    "n": "completions per prompt",
    "temperature": "0 is greedy",
    "top_p": "keep the most likely tokens up to this cumulative probability",
    "top_k": "keep this many of the most likely tokens; 0: all",
    "min_p": "drop tokens below this fraction of the top probability",
    "presence_penalty": "penalize tokens that are in the output",
    "frequency_penalty": "penalize tokens by their count in the output",
    "repetition_penalty": "divide the logits of tokens of prompt and output; 1: none",
    "seed": "makes sampling repeatable",
    "stop": "end the output before this text; may be given several times",
    "stop_token_ids": "end the output at this token id; may be given several times",
    "bad_words": "never generate this text; may be given several times",
    "max_tokens": "maximum number of tokens to generate",
    "min_tokens": "minimum number of tokens before stopping",
    "ignore_eos": "do not stop at the end-of-sequence token",
    "logprobs": "logprobs of the N most likely tokens per position",
    "prompt_logprobs": "the same for the prompt's tokens",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "put spaces between special tokens in the text",
    "repetition_detection": 'stop repetitive output, as JSON: {"max_pattern_size": N}',
    "include_stop_str_in_output": "keep the stop text at the end of the output",
    "truncate_prompt_tokens": "keep only the last N tokens of a prompt",
    "logit_bias": 'added to logits, as JSON: {"token id": bias}',
    "extra_args": 'for custom logits processors, as JSON: {"name": value}',
    "allowed_token_ids": "a token id that may be generated; may be given several times",
}


def fields() -> dict[str, msgspec.structs.FieldInfo]:
    return {f.name: f for f in msgspec.structs.fields(SamplingParams) if f.name not in NOT_FOR_USERS}


def add_sampling_flags(parser: argparse.ArgumentParser, *, show_defaults: bool = True, **defaults: Any) -> None:
    """`defaults` are this command's, if different from SamplingParams's; used for help texts only."""
    group = parser.add_argument_group("Sampling")
    for name, field in fields().items():
        default = defaults.get(name, field.default)
        is_plain = isinstance(default, (int, float, str)) and not isinstance(default, bool)
        shown = f" (default: {default})" if is_plain and show_defaults else ""
        help = HELP.get(name, f"sampling parameter {name}").replace("%", "%%") + shown
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
        flag = "--" + name.replace("_", "-")
        kind, item = _kind(field.type)
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif kind is list:
            group.add_argument(flag, action="append", type=_PARSERS[item], metavar=_METAVARS[item], **common)
        else:
            group.add_argument(flag, type=_PARSERS.get(kind, _json), metavar=_METAVARS.get(kind, "JSON"), **common)


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    return SamplingParams(**{**defaults, **_given(args)})


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Only the given flags, validated; a server has its own defaults for the rest."""
    given = _given(args)
    SamplingParams(**{"max_tokens": None, **given})
    return given


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in fields() if hasattr(args, name)}


def with_value(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """`params` with one parameter parsed from text; ValueError says what is wrong."""
    return with_values(params, {name: _typed(_field(name), text)})


def with_values(params: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    """`params` with values from JSON; ValueError says what is wrong."""
    for name in values:
        _field(name)
    try:
        return params.replace(**values)
    except TypeError as error:
        raise ValueError(f"{', '.join(values)}: {error}") from error


def _field(name: str) -> msgspec.structs.FieldInfo:
    known = fields()
    if name not in known:
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(known)}"
        raise ValueError(f"unknown sampling parameter {name!r}; {hint}")
    return known[name]


def _typed(field: msgspec.structs.FieldInfo, text: str) -> Any:
    kind, item = _kind(field.type)
    if text.lower() in ("none", "null") and (type(None) in typing.get_args(field.type) or kind is list):
        return [] if kind is list and type(None) not in typing.get_args(field.type) else None
    try:
        if kind is bool:
            return SWITCH[text.lower()]
        if kind is list:
            return _json(text) if text.startswith("[") else [_PARSERS[item](text)]
        return _PARSERS.get(kind, _json)(text)
    except KeyError:
        raise ValueError(f"{field.name} must be on or off, not {text!r}") from None
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{field.name}: {error}") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None


_PARSERS: dict[Any, Any] = {int: integer, float: number, str: str}
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


def _kind(annotation: Any) -> tuple[Any, Any]:
    """`list[int] | None` gives (list, int), `float` gives (float, None)."""
    types = [t for t in typing.get_args(annotation) if t is not type(None)]
    plain = types[0] if type(None) in typing.get_args(annotation) else annotation
    if typing.get_origin(plain) is list:
        item = typing.get_args(plain)[0]
        return (list, item) if item in _PARSERS else (dict, None)
    return plain, None
