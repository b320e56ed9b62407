"""Text that only looks like a call: it becomes content, nothing is lost, and reading stays linear."""

import random

import pytest

from quire.entrypoints.parsers.tools.base import MAX_CALLS, MAX_NAME
from quire.entrypoints.parsers.tools.reader import Reader
from quire.entrypoints.parsers.tools.registry import BUILT_IN, tool_parser
from tests.entrypoints.tools.parsed import TOOLS, cuts, parse, same_in_pieces, whole
from tests.entrypoints.tools.rendered import CHANNELS
from tests.entrypoints.tools.test_formats import CASES, Case

NO_CALLS = [
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": nul}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", '<tool_call>{"arguments": {"a": tru'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "' + "f" * (MAX_NAME + 1) + '", "arguments": {}}</tool_call>'),
    ("hermes", "text <tool_ca"),
    ("hermes", "<tool_call>"),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", "if (x) { return {}; }"),
    ("pythonic", "[now(3)]"),
    ("pythonic", "[get_weather(city"),
    ("pythonic", "[other(a=1)]"),
    ("mistral", "[TOOL_CALLS] [] [TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]now"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>hm<｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}"),
    ("glm45", "<tool_call>what is this</tool_call>"),
    ("qwen3_coder", "<tool_call>now</tool_call> <function=>"),
    ("granite", "<|tool_call|>none"),
    ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
    ("deepseek_v32", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="">'),
    ("dots", "<dots_function_call>garbage</dots_function_call>"),
    ("functiongemma", "<start_function_call>now{}<end_function_call>"),
    ("gemma4", "<|tool_call>call:{}<tool_call|>"),
    ("gigachat3", "A<|message_sep|>\n\nuser<|role_sep|>\nB"),
    ("hy_v3", "<tool_calls:x>\n<tool_call>now</tool_call>"),
    ("internlm", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    ("json", '{"name": "other", "parameters": {}} [1, {"a": []}] ```py\nx\n``` <tool_call>'),
    ("k2_horizon", "<ifm|tool_calls></ifm|tool_calls>"),
    ("lfm2", "[now()] <|tool_call_start|>now()<|tool_call_end|>"),
    ("longcat", "<longcat_tool_call>{}</longcat_tool_call>"),
    ("minicpm5", "<function> <function name=''></function>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f"\n></invoke>'),
    ("minimax_m3", "]<]minimax[>[<tool_call><invoke>"),
    ("olmo3", "<function_calls>\nnow\n</function_calls>"),
    ("plamo3", "<|plamo:begin_tool_requests:plamo|>\nnow<|plamo:end_tool_requests:plamo|>"),
    ("seed_oss", "<seed:tool_call>now</seed:tool_call>"),
    ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>now<｜tool_call_end｜>"),
    ("xlam", '```json\n[{"name": "other", "arguments": {}}]\n```'),
    ("xlam", "[1, 2]"),
]


@pytest.mark.parametrize(("format", "text"), NO_CALLS)
def test_what_is_no_call_is_content(format: str, text: str) -> None:
    result = same_in_pieces(format, text)
    assert result.calls == [] and result.content == text


@pytest.mark.parametrize(
    ("format", "text", "arguments", "content"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call> Hm',
            '{"a": 1,',
            ', "b": 2}} Hm',
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}', "}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru', '{"a": tru', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\u00', '{"a": "x\\u00', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>', '{"a": 0', "1}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1.e5}}</tool_call>', '{"a": 1.', "e5}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -}}</tool_call>', '{"a": -', "}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>', '{"a": "', '\\x"}}'),
        ("pythonic", "[now(a=1, b=f(2))] Hm", '{"a": 1, "b": f', "(2))] Hm"),
        ("pythonic", "[now(a='x", '{"a": "x', ""),
        ("glm45", "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\nx</tool_call>y", '{"a": 1', "xy"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{]<｜tool▁call▁end｜>", "{", "]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": }}]', '{"a": ', "}}]"),
    ],
)
def test_a_call_that_breaks_off(format: str, text: str, arguments: str, content: str) -> None:
    result = same_in_pieces(format, text)
    assert [found for _, found in result.calls] == [arguments] and result.content == content


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_changed_texts(case: Case) -> None:
    draw = random.Random(case.text)
    for _ in range(40):
        text = list(case.text)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(text))
            text[place : place + draw.randrange(2)] = draw.choice(
                ["", " ", "{", "}", '"', "\\", "<", "[", ",", "x", "é"]
            )
        changed = "".join(text)
        expected = whole(case.format, changed)
        pieces = draw.sample(list(cuts(changed)), 5)
        for found in [parse(tool_parser(case.format)(TOOLS), one) for one in [*pieces, list(changed)]]:
            assert (found.content, found.reasoning, found.calls) == (
                expected.content,
                expected.reasoning,
                expected.calls,
            )
        if not expected.calls and case.format not in CHANNELS:
            assert expected.content == changed


def test_deep_nesting_ends_the_call() -> None:
    result = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000)
    assert len(result.calls) == 1 and result.content.count("[") > 4000
    result = whole("pythonic", "[now(a=" + "[" * 5000)
    assert len(result.calls) == 1 and result.content.count("[") > 4000


def test_the_number_of_calls_has_a_limit() -> None:
    result = whole("hermes", '<tool_call>{"name": "f"}</tool_call>' * (MAX_CALLS + 2))
    assert len(result.calls) == MAX_CALLS and result.content.count("<tool_call>") == 2


LONG = 4000
HARD = {
    "hermes": [
        '<tool_call>{"name": "f", "arguments": {"a": "%s',
        "%s",
        '<tool_call>{"arguments": {"a": "%s',
        "<tool_call>%s",
    ],
    "llama3_json": ['{"parameters": {"a": "%s', '{"%s'],
    "pythonic": ["[now(a='%s", "[%s", "[now(%s"],
    "mistral": ["[TOOL_CALLS]%s", "[TOOL_CALLS]f{%s"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s"],
    "glm45": ["<tool_call>now\n<arg_key>a</arg_key><arg_value>%s", "<tool_call>now\n<arg_key>%s"],
    "qwen3_coder": ["<function=get_weather><parameter=city>%s", "<function=now><parameter=a>%s"],
    "openai": ["<|channel|>final<|message|>%s", "<|channel|>%s"],
    "gemma4": ['<|tool_call>call:f{a:<|"|>%s', "<|tool_call>call:f{a:%s", "<|tool_call>call:f{%s"],
    "hy_v3": ["<tool_calls%s", "<tool_calls:%s"],
    "minimax_m2": ['<minimax:tool_call><invoke name="%s', "<minimax:tool_call><invoke name=f><parameter name=a>%s"],
    "minimax_m3": ["]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=f>]<]minimax[>[<a>%s"],
    "kimi_k3": ["<|open|>tools<|sep|><|open|>call %s", "<|open|>think<|sep|>%s"],
    "cohere_command3": ["</co%s", "<|START_ACTION|>%s"],
    "muse_glimmer": [" to=%s", "<|start|>%s"],
}


@pytest.mark.parametrize("format", HARD)
@pytest.mark.parametrize("filler", ["x", " ", "\n", "<", "{", "[", "1", "\\", "<tool_", '{"', '"a": {'])
def test_reading_is_linear(format: str, filler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text re-read per character is bounded, however long the text is."""
    waiting: list[int] = []
    add = Reader.add

    def counted(self: Reader, text: str) -> None:
        add(self, text)
        waiting.append(len(self.text))

    monkeypatch.setattr(Reader, "add", counted)
    for template in HARD[format]:
        filled = filler * (LONG // len(filler))
        text = template % filled
        waiting.clear()
        result = parse(tool_parser(format)(TOOLS), text)
        assert max(waiting) <= 3 * MAX_NAME
        if filler.strip():
            called = sum(len(arguments) for _, arguments in result.calls)
            assert len(result.content) + len(result.reasoning) + called >= len(filled)


def test_every_format_takes_a_text_without_calls() -> None:
    text = "\n Hello, wörld! [1] {a} <b> `code`\n\n"
    for name in BUILT_IN:
        assert same_in_pieces(name, text).content == text
