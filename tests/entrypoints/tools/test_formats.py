"""Outputs of each model family, whole and split at every position."""

from typing import Any, NamedTuple

import pytest

from tests.entrypoints.tools.parsed import same_in_pieces, whole
from tests.entrypoints.tools.rendered import CHANNELS

OSLO = {"city": "Oslo", "days": 3}
NESTED = {"city": 'Zürich "Mitte" \\ 東京 🌧', "where": {"box": [[1.5, -2e3], {"deep": None}], "ok": True}}
NESTED_JSON = (
    r'{"city": "Zürich \"Mitte\" \\ 東京 \ud83c\udf27", "where": {"box": [[1.5, -2e3], {"deep": null}], "ok": true}}'
)


class Case(NamedTuple):
    format: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""


HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
DS3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
DS31 = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
DS = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
KIMI = "<|tool_call_begin|>functions.%s<|tool_call_argument_begin|>%s<|tool_call_end|>"
KIMIS = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"

NS = "]<]minimax[>["
M3 = f"{NS}<tool_call>\n{NS}%s\n{NS}</tool_call>"

CASES = {
    "hermes": Case("hermes", HERMES, [("get_weather", OSLO)]),
    "hermes, text before": Case("hermes", f"I look it up.\n\n{HERMES}", [("get_weather", OSLO)], "I look it up."),
    "hermes, text around": Case(
        "hermes", f"First. {HERMES}\nThen <b>this</b>.", [("get_weather", OSLO)], "First.Then <b>this</b>."
    ),
    "hermes, two": Case(
        "hermes",
        f'{HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        [("get_weather", OSLO), ("now", {})],
    ),
    "hermes, nested": Case(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {NESTED_JSON}}}</tool_call>',
        [("get_weather", NESTED)],
    ),
    "hermes, arguments first": Case(
        "hermes",
        '<tool_call>{"arguments": {"city": "Oslo", "days": 3}, "id": 7, "name": "get_weather"}</tool_call>',
        [("get_weather", OSLO)],
    ),
    "hermes, no arguments": Case("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    "hermes, null": Case("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
    "hermes, arguments in a string": Case(
        "hermes",
        r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Oslo\", \"days\": 3}"}</tool_call>',
        [("get_weather", OSLO)],
    ),
    "hermes, no closing tag": Case(
        "hermes", f"{HERMES.removesuffix('</tool_call>')}{HERMES}", [("get_weather", OSLO)] * 2
    ),
    "hermes, line break in a string": Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        [("get_weather", {"city": "a\nb\tc"})],
    ),
    "hermes, numbers": Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [-0, 10.25, 1E+5, 2e-3, %s]}}</tool_call>' % ("7" * 600),
        [("f", {"a": [0, 10.25, 1e5, 2e-3, int("7" * 600)]})],
    ),
    "hermes, a tag in a string": Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        [("get_weather", {"city": "</tool_call>"})],
    ),
    "hermes, plain": Case("hermes", " An answer with <b> and {x}.\n ", [], " An answer with <b> and {x}.\n "),
    "llama": Case(
        "llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}', [("get_weather", OSLO)]
    ),
    "llama, type": Case(
        "llama3_json",
        '{"type": "function", "name": "get_weather", "parameters": ' + NESTED_JSON + "}",
        [("get_weather", NESTED)],
    ),
    "llama, tag and several": Case(
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Oslo", '
        '"days": 3}}',
        [("now", {}), ("get_weather", OSLO)],
    ),
    "llama, text before": Case(
        "llama3_json", 'Sure:\n{"name": "now", "parameters": {}}\nDone; {x}', [("now", {})], "Sure:Done; {x}"
    ),
    "llama, a JSON answer": Case(
        "llama3_json",
        '{"answer": {"name": "now"}, "parameters": [1]}',
        [],
        '{"answer": {"name": "now"}, "parameters": [1]}',
    ),
    "llama, a person": Case(
        "llama3_json", '{"name": "Bob", "parameters": {"age": 3}}', [], '{"name": "Bob", "parameters": {"age": 3}}'
    ),
    "pythonic": Case("pythonic", '[get_weather(city="Oslo", days=3)]', [("get_weather", OSLO)]),
    "pythonic, several": Case(
        "pythonic",
        "[get_weather(city='Oslo', days=3), now(), math.add(a=-1.5, b=[1, 2, ], c=(), d={'x': {'y': None}}, e=True)]",
        [
            ("get_weather", OSLO),
            ("now", {}),
            ("math.add", {"a": -1.5, "b": [1, 2], "c": [], "d": {"x": {"y": None}}, "e": True}),
        ],
    ),
    "pythonic, escapes": Case(
        "llama4_pythonic",
        r"<|python_start|>[get_weather(city='it\'s \"x\"\n\x41\u00e9\U0001F327\101\q 東京')]<|python_end|>",
        [("get_weather", {"city": 'it\'s "x"\nAé🌧A\\q 東京'})],
    ),
    "pythonic, a list": Case("pythonic", "[1, 2] is a list, [f(x)] too", [], "[1, 2] is a list, [f(x)] too"),
    "pythonic, a link": Case("pythonic", "[now](https://example.org)", [], "[now](https://example.org)"),
    "mistral": Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, {"name": "now", '
        '"arguments": {}, "id": "abcdefghi"}]',
        [("get_weather", OSLO), ("now", {})],
    ),
    "mistral, newer": Case(
        "mistral",
        f"Let me see.[TOOL_CALLS]get_weather{NESTED_JSON}[TOOL_CALLS]now{{}}",
        [("get_weather", NESTED), ("now", {})],
        "Let me see.",
    ),
    "mistral, with ids": Case(
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        [("get_weather", OSLO), ("now", {})],
    ),
    "deepseek v3": Case(
        "deepseek_v3",
        "Gut.\n" + DS % (DS3 % ("get_weather", NESTED_JSON) + "\n" + DS3 % ("now", "{}")),
        [("get_weather", NESTED), ("now", {})],
        "Gut.",
    ),
    "deepseek v3.1": Case(
        "deepseek_v31",
        DS % (DS31 % ("get_weather", NESTED_JSON) + DS31 % ("now", "{}")),
        [("get_weather", NESTED), ("now", {})],
    ),
    "kimi": Case(
        "kimi_k2",
        "Ja. " + KIMIS % (KIMI % ("get_weather:0", NESTED_JSON) + KIMI % ("now:1", "{}")),
        [("get_weather", NESTED), ("now", {})],
        "Ja.",
    ),
    "granite": Case(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, {"name": "now", '
        '"arguments": {}}]',
        [("get_weather", OSLO), ("now", {})],
    ),
    "granite, no marker": Case(
        "granite", '[{"name": "get_weather", "arguments": ' + NESTED_JSON + "}]", [("get_weather", NESTED)]
    ),
    "granite, a list": Case("granite", '[{"a": 1}]', [], '[{"a": 1}]'),
    "granite 20b": Case(
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}} <function_call> '
        '{"name": "now", "arguments": {}}',
        [("get_weather", OSLO), ("now", {})],
    ),
    "jamba": Case("jamba", '<tool_calls>[\n{"name": "now", "arguments": {}}\n]</tool_calls>', [("now", {})]),
    "phi": Case("phi4_mini_json", 'functools[{"name": "now", "arguments": {}}]', [("now", {})]),
    "glm": Case(
        "glm45",
        'Ich sehe nach.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo "N" <b>\n2</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"a": [1]}'
        "</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [("get_weather", {"city": 'Oslo "N" <b>\n2', "days": 3, "where": {"a": [1]}}), ("now", {})],
        "Ich sehe nach.",
    ),
    "glm 4.7": Case(
        "glm47",
        "<tool_call>get_weather<arg_key>note</arg_key><arg_value>12</arg_value><arg_key>tags</arg_key><arg_value>null"
        "</arg_value><arg_key>other</arg_key><arg_value>yes or no</arg_value></tool_call>",
        [("get_weather", {"note": "12", "tags": None, "other": "yes or no"})],
    ),
    "qwen3 coder": Case(
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nif x < 3:\n    "a"\n\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n<parameter=where>\n{"a":\n 1}\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [
            ("get_weather", {"city": 'if x < 3:\n    "a"\n', "days": 3, "unit": "celsius", "where": {"a": 1}}),
            ("now", {}),
        ],
    ),
    "qwen3 coder, no outer tag": Case(
        "qwen3_coder",
        "Hm.\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "Oslo"})],
        "Hm.",
    ),
    "gpt-oss": Case(
        "openai",
        "<|channel|>analysis<|message|>Weather <is> asked.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>',
        [("get_weather", OSLO)],
        reasoning="Weather <is> asked.",
    ),
    "gpt-oss, recipient first": Case(
        "openai",
        "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
        [("now", {})],
        "I call.",
    ),
    "minimax m3, nested": Case(
        "minimax_m3",
        "Gut.\n"
        + M3
        % '<invoke name="get_weather">{n}<city>Oslo{n}</city>{n}<days>3{n}</days>{n}<where>{n}<box>{n}<item>1{n}'
        "</item>{n}<item>b{n}</item>{n}</box>{n}<x>1{n}</x>{n}<x>2{n}</x>{n}<ok>true{n}</ok>{n}</where>{n}<tags>{n}"
        "</tags>{n}</invoke>".replace("{n}", NS),
        [("get_weather", {**OSLO, "where": {"box": [1, "b"], "x": [1, 2], "ok": True}, "tags": []})],
        "Gut.",
    ),
    "gemma 4, nested": Case(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris, {France}<|"|>,where:{<|"|>a b<|"|>:[1,-2.5e3,null,[],{}],'
        'c:yes,d:[<|"|>x]<|"|>, ]}, days: 3 }<tool_call|>\n<|tool_call>call:now{}<tool_call|>',
        [
            (
                "get_weather",
                {
                    "city": "Paris, {France}",
                    "where": {"a b": [1, -2500.0, None, [], {}], "c": "yes", "d": ["x]"]},
                    "days": 3,
                },
            ),
            ("now", {}),
        ],
    ),
    "function gemma, bare numbers": Case(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>12<escape>,days:3,x:<escape>42<escape>}<end_function_call>",
        [("get_weather", {"city": "12", "days": 3, "x": 42})],
    ),
    "cohere": Case(
        "cohere_command3",
        "<|START_THINKING|>I call <co>it</co: 0:[1]>.<|END_THINKING|><|START_ACTION|>\n[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo", "days": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]\n<|END_ACTION|>',
        [("get_weather", OSLO), ("now", {})],
        reasoning="I call it.",
    ),
    "cohere, citations": Case(
        "cohere_command3",
        "<|START_THINKING|>Hm<|END_THINKING|>\n<|START_RESPONSE|>foo <co>bar</co: 0:[1,2],1:[3]>.<|END_RESPONSE|>",
        [],
        "foo bar.",
        "Hm",
    ),
    "inkling": Case(
        "inkling",
        "<|message_model|><|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>I look.<|end_message|>"
        '<|message_model|><|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>',
        [("now", {})],
        "I look.",
        "Hm.",
    ),
    "kimi k3": Case(
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="a&quot;b" index="1"<|sep|><|open|>argument key="x" type="number"'
        "<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        [('a"b', {"x": 1})],
        "I look.",
        "Hm.",
    ),
    "muse": Case(
        "muse_glimmer",
        'to=self<|message|>An <atem:invoke name="x"> here.<|eom|><|start|>assistant to=get_weather.get_weather'
        '<|message|>\n<atem:function_calls>\n<atem:invoke name="get_weather.get_weather">\n<atem:parameter name="city">'
        "Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done"
        "<|eot|>",
        [("get_weather", {"city": "Oslo"})],
        "Done",
        'An <atem:invoke name="x"> here.',
    ),
    "gigachat, text before": Case(
        "gigachat3",
        'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}',
        [("now", {})],
        "I look.",
    ),
    "xlam, code": Case(
        "xlam",
        'Code:\n```python\nx = [1]\n```\nand\n```json\n[{"name": "now", "arguments": {}}]\n```',
        [("now", {})],
        "Code:\n```python\nx = [1]\n```\nand",
    ),
    "xlam, after reasoning": Case(
        "xlam", '<think>Hm [1].</think>[{"name": "now", "arguments": {}}]', [("now", {})], "<think>Hm [1].</think>"
    ),
    "olmo": Case(
        "olmo3",
        'I look.\n<function_calls>\nget_weather(city="Oslo", days=3)\nnow(a=null, b=true)\n</function_calls>',
        [("get_weather", OSLO), ("now", {"a": None, "b": True})],
        "I look.",
    ),
    "hunyuan 3": Case(
        "hy_v3",
        "I look.<tool_calls:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        [("now", {})],
        "I look.",
    ),
    "gpt-oss, final": Case("openai", "<|channel|>final<|message|>Hi <there>.\n<|return|>", [], "Hi <there>.\n"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_whole_and_in_pieces(case: Case) -> None:
    result = same_in_pieces(case.format, case.text)
    assert result.parsed == case.calls
    assert (result.content, result.reasoning) == (case.content, case.reasoning)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_text_that_ends_too_early(case: Case) -> None:
    """Emitted deltas do not depend on how the text continues, and are never revoked."""
    before = whole(case.format, "")
    for end in range(1, len(case.text)):
        now = whole(case.format, case.text[:end])
        for old, new in zip(before.calls, now.calls, strict=False):
            assert old[0] == new[0]
        assert len(now.calls) >= len(before.calls)
        assert now.content or now.calls or now.reasoning or not case.text[:end].strip() or case.format in CHANNELS
        before = now
    for end in range(1, len(case.text), 23):
        same_in_pieces(case.format, case.text[:end])


def test_ids() -> None:
    kimi = CASES["kimi"]
    assert whole(kimi.format, kimi.text).ids == ["functions.get_weather:0", "functions.now:1"]
    mistral = whole("mistral", CASES["mistral"].text).ids + whole("mistral", CASES["mistral, with ids"].text).ids
    assert all(len(id) == 9 and id.isalnum() for id in mistral) and len(set(mistral)) == 4
    assert mistral[2] == "abcdefghi"
    assert whole("cohere_command3", CASES["cohere"].text).ids == ["0", "1"]
    hermes = whole("hermes", CASES["hermes, two"].text).ids
    assert len(set(hermes)) == 2 and all(id.startswith("call_") for id in hermes)


def test_arguments_stream_as_they_come() -> None:
    from quire.entrypoints.parsers.tools.registry import tool_parser

    parser = tool_parser("hermes")([])
    assert parser.feed('<tool_call>{"name": "f", "argu').tool_calls == []
    first = parser.feed('ments": {"text": "one').tool_calls
    assert [(call.name, call.arguments) for call in first] == [("f", ""), (None, '{"text": "one')]
    assert [call.arguments for call in parser.feed(" two").tool_calls] == [" two"]
    assert [call.arguments for call in parser.feed('"}}</tool_').tool_calls] == ['"}']
    rest = parser.feed("call>")
    assert not rest.tool_calls and not rest.content
