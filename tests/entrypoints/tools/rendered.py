"""Calls written as each format's chat template writes them, or the model was trained to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [as_json({"name": name, key: arguments}) for name, arguments in calls]


def listed(calls: Sequence[Call], key: str = "arguments") -> str:
    return f"[{', '.join(objects(calls, key))}]"


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))


def escaped(calls: Sequence[Call]) -> str:
    """The same with every other character as an escape, as many templates' `tojson` has it."""
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': args}, indent=1)}</tool_call>" for name, args in calls
    )


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(objects(calls, "parameters"))


def llama3_tagged(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + llama3(calls)


def pythonic(calls: Sequence[Call]) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls)
    return f"[{', '.join(written)}]"


def llama4(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{as_json(arguments)}" for name, arguments in calls)


def mistral_ids(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh{i % 10}[ARGS]{as_json(args)}" for i, (name, args) in enumerate(calls)
    )


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(args)}<｜tool▁call▁end｜>" for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{as_json(args)}<|tool_call_end|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def glm45(calls: Sequence[Call], line: str = "\n") -> str:
    def argument(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else as_json(value)
        return f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}"

    return line.join(
        f"<tool_call>{name}{line}{''.join(argument(*one) for one in args.items())}</tool_call>" for name, args in calls
    )


def glm47(calls: Sequence[Call]) -> str:
    return glm45(calls, "")


def qwen3_coder(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        # Its template writes lists and objects as JSON, all else as Python's str() does.
        text = as_json(value) if isinstance(value, (dict, list)) else str(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{''.join(argument(*one) for one in args.items())}</function>\n</tool_call>"
        for name, args in calls
    )


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(args)}<|call|>"
        for name, args in calls
    )


def harmony_recipient_first(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{as_json(args)}<|call|>" for name, args in calls
    )


# Each format's ways of writing; those of one parser under two names are under one.
WRITERS: dict[str, list[Callable[[Sequence[Call]], str]]] = {
    "hermes": [hermes, escaped],
    "llama3_json": [llama3, llama3_tagged],
    "pythonic": [pythonic, llama4],
    "mistral": [lambda calls: f"[TOOL_CALLS] {listed(calls)}", mistral, mistral_ids],
    "deepseek_v3": [deepseek_v3, deepseek_v31],
    "kimi_k2": [kimi],
    "glm45": [glm45, glm47],
    "qwen3_coder": [qwen3_coder],
    "granite": [lambda calls: f"<|tool_call|>{listed(calls)}", lambda calls: f"<tool_call>{listed(calls)}", listed],
    "granite-20b-fc": [lambda calls: " ".join(f"<function_call> {one}" for one in objects(calls))],
    "jamba": [lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>"],
    "phi4_mini_json": [lambda calls: f"functools{listed(calls)}"],
    "openai": [harmony, harmony_recipient_first],
}
# Written without quotes: what closes an argument cannot be part of one.
UNQUOTED = {"glm45": "</arg_value>", "qwen3_coder": "</parameter>"}
