"""Calls written as each format's chat template writes them, or the model was trained to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]
KINDS = {
    **{str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"},
    type(None): "null",
}


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


def qwen3_coder(calls: Sequence[Call], tag: str = "tool_call") -> str:
    def argument(key: str, value: Any) -> str:
        # Its template writes lists and objects as JSON, all else as Python's str() does.
        text = as_json(value) if isinstance(value, (dict, list)) else str(value)
        return f"<parameter={key}>\n{text}\n</parameter>\n"

    return "\n".join(
        f"<{tag}>\n<function={name}>\n{''.join(argument(*one) for one in args.items())}</function>\n</{tag}>"
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


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def invoke(wrapper: str, prefix: str = "", tags: tuple[str, str] = ("invoke", "parameter")) -> Writer:
    """<wrapper><invoke name="f"><parameter name="a">1</parameter></invoke></wrapper>"""
    one, parameter = prefix + tags[0], prefix + tags[1]

    def write(calls: Sequence[Call]) -> str:
        written = "\n".join(
            f'<{one} name="{name}">\n'
            + "".join(f'<{parameter} name="{key}">{text_of(value)}</{parameter}>\n' for key, value in args.items())
            + f"</{one}>"
            for name, args in calls
        )
        return f"<{wrapper}>\n{written}\n</{wrapper}>" if wrapper else written

    return write


def dsml(wrapper: str, prefix: str) -> Writer:
    def argument(key: str, value: Any) -> str:
        string = "true" if isinstance(value, str) else "false"
        return f'<{prefix}parameter name="{key}" string="{string}">{text_of(value)}</{prefix}parameter>\n'

    def write(calls: Sequence[Call]) -> str:
        written = "\n".join(
            f'<{prefix}invoke name="{name}">\n{"".join(argument(*one) for one in args.items())}</{prefix}invoke>'
            for name, args in calls
        )
        return f"<{wrapper}>\n{written}\n</{wrapper}>"

    return write


def step3(calls: Sequence[Call]) -> str:
    write = invoke("", "steptml:")
    written = "<｜tool_sep｜>".join(f"<｜tool_call_begin｜>{write([one])}<｜tool_call_end｜>" for one in calls)
    return f"<｜tool_calls_begin｜>{written}<｜tool_calls_end｜>"


def minicpm5_cdata(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}"><![CDATA[{text_of(value)}]]></param>' for key, value in args.items())
        + "</function>"
        for name, args in calls
    )


def minimax_m3(calls: Sequence[Call]) -> str:
    namespace = "]<]minimax[>["

    def inner(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{namespace}<{key}>{inner(one)}{namespace}</{key}>" for key, one in value.items())
        if isinstance(value, list):
            return "".join(f"{namespace}<item>{inner(one)}{namespace}</item>" for one in value)
        return text_of(value)

    written = "\n".join(f'{namespace}<invoke name="{name}">{inner(args)}{namespace}</invoke>' for name, args in calls)
    return f"{namespace}<tool_call>\n{written}\n{namespace}</tool_call>"


def arg_keys(prefix: str = "", suffix: str = "", line: str = "\n", sep: bool = False, typed: bool = False) -> Writer:
    def tag(name: str, text: str) -> str:
        return f"<{prefix}{name}{suffix}>{text}</{prefix}{name}{suffix}>{line}"

    def argument(key: str, value: Any) -> str:
        kind = tag("arg_type", KINDS[type(value)]) if typed else ""
        return tag("arg_key", key) + kind + tag("arg_value", text_of(value))

    def write(calls: Sequence[Call]) -> str:
        between = f"<{prefix}tool_sep{suffix}>{line}" if sep else line
        written = "".join(
            tag("tool_call", name + between + "".join(argument(*one) for one in args.items())) for name, args in calls
        )
        return tag("tool_calls", line + written)

    return write


def gemma(opens: str, closes: str, quote: str, quote_all: bool = False) -> Writer:
    def value_of(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{quote}{key}{quote}:{value_of(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(value_of, value)) + "]"
        return as_json(value)

    def argument(value: Any) -> str:
        return f"{quote}{text_of(value)}{quote}" if quote_all else value_of(value)

    def write(calls: Sequence[Call]) -> str:
        return "".join(
            f"{opens}call:{name}{{{','.join(f'{key}:{argument(value)}' for key, value in args.items())}}}{closes}"
            for name, args in calls
        )

    return write


def seed_oss(calls: Sequence[Call]) -> str:
    return qwen3_coder(calls, "seed:tool_call")


def apertus(calls: Sequence[Call]) -> str:
    return f"<|tools_prefix|>[{', '.join(as_json({name: args}) for name, args in calls)}]<|tools_suffix|>"


def cohere(calls: Sequence[Call]) -> str:
    written = [
        {"tool_call_id": str(i), "tool_name": name, "parameters": arguments}
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>\n{json.dumps(written, indent=4, ensure_ascii=False)}\n<|END_ACTION|>"


def inkling(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|message_model|><|content_invoke_tool_json|>{one}<|end_message|>" for one in objects(calls, "args")
    )


def kimi_k3(calls: Sequence[Call]) -> str:
    def element(name: str, attributes: str, text: str) -> str:
        return f"<|open|>{name}{attributes}<|sep|>{text}<|close|>{name}<|sep|>"

    def argument(key: str, value: Any) -> str:
        return element("argument", f' key="{key}" type="{KINDS[type(value)]}"', text_of(value))

    return element(
        "tools",
        "",
        "".join(
            element("call", f' tool="{name}" index="{i + 1}"', "".join(argument(*one) for one in args.items()))
            for i, (name, args) in enumerate(calls)
        ),
    )


def muse_glimmer(calls: Sequence[Call]) -> str:
    write = invoke("atem:function_calls", "atem:")
    return "<|start|>assistant".join(f" to={call[0]}<|message|>{write([call])}<|eom|>" for call in calls)


def plamo3(calls: Sequence[Call]) -> str:
    def tag(name: str, text: str) -> str:
        return f"<|plamo:begin_{name}:plamo|>{text}<|plamo:end_{name}:plamo|>"

    return tag(
        "tool_requests",
        "\n".join(
            tag(
                "tool_request",
                "\n"
                + tag("tool_name", name)
                + "\n"
                # Chat templates write the constraint, as harmony has it.
                + tag("tool_arguments", f"<|plamo:constrain|>json<|plamo:msg|>{as_json(arguments)}")
                + "\n",
            )
            for name, arguments in calls
        ),
    )


def olmo3(calls: Sequence[Call]) -> str:
    return "<function_calls>\n" + "\n".join(pythonic([one])[1:-1] for one in calls) + "\n</function_calls>"


# Each format's ways of writing; those of one parser under two names are under one.
WRITERS: dict[str, list[Writer]] = {
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
    "apertus": [apertus],
    "cohere_command3": [cohere],
    "deepseek_v32": [
        dsml("｜DSML｜function_calls", "｜DSML｜"),
        dsml("｜DSML｜tool_calls", "｜DSML｜"),
        dsml("｜DSML｜ calls", "｜DSML｜ "),
    ],
    "dots": [
        invoke("dots_function_call"),
        lambda calls: "".join(f"<dots_function_call>{one}</dots_function_call>" for one in objects(calls)),
    ],
    "functiongemma": [gemma("<start_function_call>", "<end_function_call>", "<escape>", quote_all=True)],
    "gemma4": [gemma("<|tool_call>", "<tool_call|>", '<|"|>')],
    "gigachat3": [
        lambda calls: "".join(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{one}" for one in objects(calls)),
        lambda calls: "".join(f"<|function_call|>{one}" for one in objects(calls)),
    ],
    "hy_v3": [arg_keys(sep=True), arg_keys(suffix=":opensource", line="", sep=True), arg_keys(suffix=":6124c78e")],
    "inkling": [inkling],
    "internlm": [
        lambda calls: "".join(
            f"<|action_start|><|plugin|>\n{one}<|action_end|>\n" for one in objects(calls, "parameters")
        )
    ],
    "json": [
        lambda calls: listed(calls, "parameters"),
        lambda calls: "\n".join(objects(calls, "parameters")),
        lambda calls: "\n".join(f"```json\n{one}\n```" for one in objects(calls)),
        lambda calls: f"```\n{listed(calls)}\n```",
        lambda calls: "\n".join(f"<tool_call>{one}</tool_call>" for one in objects(calls)),
        lambda calls: f"[TOOL_CALLS]{listed(calls)}",
    ],
    "k2_horizon": [
        arg_keys("ifm|"),
        arg_keys("ifm|", line="", typed=True),
        lambda calls: "".join(f"<ifm|tool_call>{one}</ifm|tool_call>" for one in objects(calls)),
    ],
    "kimi_k3": [kimi_k3],
    "lfm2": [lambda calls: f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"],
    "longcat": [lambda calls: "\n".join(f"<longcat_tool_call>{one}</longcat_tool_call>" for one in objects(calls))],
    "minicpm5": [invoke("", tags=("function", "param")), minicpm5_cdata],
    "minimax_m2": [invoke("minimax:tool_call")],
    "minimax_m3": [minimax_m3],
    "muse_glimmer": [muse_glimmer],
    "olmo3": [olmo3],
    "plamo3": [plamo3],
    "seed_oss": [seed_oss],
    "step3": [step3],
}
# Written without quotes: what closes an argument cannot be part of one.
UNQUOTED = {
    "deepseek_v32": "parameter>",
    "dots": "</parameter>",
    "functiongemma": "<escape>",
    "gemma4": '<|"|>',
    "glm45": "</arg_value>",
    "hy_v3": "</arg_value",
    "k2_horizon": "</ifm|arg_value>",
    "kimi_k3": "<|close|>argument<|sep|>",
    "minicpm5": "</param>",
    "minimax_m2": "</parameter>",
    "minimax_m3": "]<]minimax[>[",
    "muse_glimmer": "</atem:parameter>",
    "qwen3_coder": "</parameter>",
    "seed_oss": "</parameter>",
    "step3": "</steptml:parameter>",
}
# Formats that name reasoning, content and calls by markers: text that is none of them may still lose its markers.
CHANNELS = {"cohere_command3", "inkling", "kimi_k3", "muse_glimmer", "openai"}
