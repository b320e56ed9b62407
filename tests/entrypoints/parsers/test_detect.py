"""Parsers chosen from what chat templates of each family hold."""

import pytest

from quire.entrypoints.parsers.detect import REASONING_RULES, TOOL_RULES, ParserNames, choose, parser_names
from quire.entrypoints.parsers.reasoning.registry import known_formats
from quire.entrypoints.parsers.tools.registry import known_parsers

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN3 = '{% if tools %}<tools>{{ tools }}</tools> <tool_call>\\n{"name": ...}\\n</tool_call>{% endif %}<think></think>'
QWEN_CODER = "{% if tools %}<tool_call>\\n<function=f>\\n<parameter=a>{% endif %}"
GLM = "[gMASK]<sop>{% if tools %}<tool_call>{name}<arg_key>{key}</arg_key>{% endif %}<think></think>"
HY = "{% if tools %}<tool_calls:x><tool_call:x>f<arg_key:x>{% endif %}"
R1 = "{{ content.split('</think>')[-1] }}<｜tool▁calls▁begin｜>"
GPT_OSS = "<|start|>developer<|message|>namespace functions {}<|channel|>analysis<|message|>"
LLAMA3 = 'Respond in the format {"name": function name, "parameters": dictionary}. <|python_tag|>'
GRANITE4 = "{% if tools %}<tools></tools><tool_call>{% endif %}"

CASES = [
    (CHATML, "llama", "json", None),
    (CHATML, "qwen2", "json", None),
    ("{% if tools %}" + CHATML, "qwen2", "hermes", None),
    (QWEN3, "qwen3", "hermes", "qwen3"),
    (QWEN_CODER, "qwen3_moe", "qwen3_coder", None),
    (GLM, "glm4_moe", "glm45", "glm45"),
    (HY, "hy_v3", "hy_v3", None),
    (R1, "deepseek_v3", "deepseek_v3", "deepseek_v3"),
    (GPT_OSS, "gpt_oss", "openai", "openai_gptoss"),
    (LLAMA3, "llama", "llama3_json", None),
    (GRANITE4, "granitemoehybrid", "hermes", None),
    ("[TOOL_CALLS] [THINK]", "mistral3", "mistral", "mistral"),
    ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4", "gemma4"),
    ("<|tool_call|>", "granite", "granite", None),
    ("<｜DSML｜tool_calls> </think>", "deepseek_v4", "deepseek_v32", "deepseek_v3"),
    ("<|tool_calls_section_begin|> <think>", "kimi_k2", "kimi_k2", "kimi_k2"),
    ("<|START_ACTION|> <|START_THINKING|>", "cohere2", "cohere_command3", "cohere_command3"),
]


@pytest.mark.parametrize(("template", "family", "tools", "reasoning"), CASES)
def test_what_a_template_tells(template: str, family: str, tools: str, reasoning: str | None) -> None:
    assert parser_names(None, None, True, template, True, family) == ParserNames(tools, reasoning)


def test_flags_override() -> None:
    assert parser_names("mistral", "granite", True, QWEN3, True, "qwen3") == ParserNames("mistral", "granite")
    assert parser_names("none", "none", True, QWEN3, True, "qwen3") == ParserNames(None, None)
    assert parser_names(None, None, False, QWEN3, True, "qwen3") == ParserNames(None, "qwen3")
    assert str(parser_names("none", None, True, QWEN3, True, "qwen3")) == "tool calls: none, reasoning: qwen3"


def test_a_template_that_does_not_take_tools() -> None:
    """The distilled R1 models' templates write earlier calls, but no tools."""
    assert parser_names(None, None, True, R1, False, "qwen2") == ParserNames("json", "qwen3")
    assert parser_names("deepseek_v3", None, True, R1, False, "qwen2").tools == "deepseek_v3"


def test_a_model_without_template() -> None:
    assert parser_names(None, None, True, None, False, "") == ParserNames("json", None)


def test_every_rule_names_a_parser() -> None:
    assert {rule.parser for rule in TOOL_RULES} <= set(known_parsers())
    assert {rule.parser for rule in REASONING_RULES} <= set(known_formats())
    for rules in (TOOL_RULES, REASONING_RULES):
        for rule in rules:
            assert choose(rules, " ".join(rule.texts), rule.families[0]) is not None
