"""Chooses a model's parsers from its chat template and family."""

from collections.abc import Sequence
from dataclasses import dataclass

OFF = "none"
JSON = "json"  # the tool format of models that have none of their own


@dataclass(frozen=True)
class Rule:
    """A parser for templates that hold all of `texts`, of models whose type begins with one of `families`, if any."""

    parser: str
    texts: tuple[str, ...]
    families: tuple[str, ...] = ("",)


# The first rule that applies counts: special markers before those that many families use.
TOOL_RULES = (
    Rule("openai", ("<|channel|>", "<|message|>", "functions")),
    Rule("muse_glimmer", ("<atem:",)),
    Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Rule("plamo3", ("begin_tool_request",)),
    Rule("deepseek_v32", ("｜DSML｜",)),
    Rule("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    Rule("step3", ("steptml:",)),
    Rule("minimax_m3", ("]<]minimax[>[",)),
    Rule("minimax_m2", ("<minimax:tool_call>",)),
    Rule("dots", ("<dots_function_call>",)),
    Rule("k2_horizon", ("ifm|tool_call",)),
    Rule("hy_v3", ("<tool_calls", "<arg_key")),
    Rule("glm45", ("<arg_key>",)),
    Rule("seed_oss", ("<seed:tool_call>",)),
    Rule("minicpm5", ("<function name=", "<param name=")),
    Rule("qwen3_coder", ("<function=", "<parameter=")),
    Rule("gemma4", ("<|tool_call>", "call:")),
    Rule("functiongemma", ("<start_function_call>",)),
    Rule("inkling", ("<|content_invoke_tool_json|>",)),
    Rule("cohere_command3", ("<|START_ACTION|>",)),
    Rule("apertus", ("<|tools_prefix|>",)),
    Rule("lfm2", ("<|tool_call_start|>",)),
    Rule("olmo3", ("<function_calls>",)),
    Rule("longcat", ("<longcat_tool_call>",)),
    Rule("internlm", ("<|action_start|>", "<|plugin|>")),
    Rule("gigachat3", ("<|function_call|>",)),
    Rule("gigachat3", ("function call", "<|role_sep|>")),
    Rule("mistral", ("[TOOL_CALLS]",)),
    Rule("phi4_mini_json", ("functools",)),
    Rule("granite-20b-fc", ("<function_call>",)),
    Rule("granite", ("<|tool_call|>",)),
    Rule("jamba", ("<tool_calls>",)),
    Rule("hermes", ("<tool_call>",)),
    Rule("granite", ("tools",), ("granite",)),
    Rule("hermes", ("tools",), ("qwen2", "qwen3", "smollm3")),
    Rule("llama3_json", ('"parameters"', "function name")),
    Rule("pythonic", ("<|python_start|>",)),
    Rule("pythonic", ("func_name1(",)),
    Rule("llama3_json", ("<|python_tag|>",)),
)
REASONING_RULES = (
    Rule("openai_gptoss", ("<|channel|>", "analysis")),
    Rule("muse_glimmer", ("to=self",)),
    Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    Rule("plamo3", ("begin_think",)),
    Rule("minimax_m3", ("<mm:think>",)),
    Rule("seed_oss", ("<seed:think>",)),
    Rule("k2_horizon", ("<ifm|think",)),
    Rule("mistral", ("[THINK]",)),
    Rule("gemma4", ("<|channel>", "thought")),
    Rule("cohere_command3", ("<|START_THINKING|>",)),
    Rule("inkling", ("<|content_thinking|>",)),
    Rule("granite", ("Here is my thought process",)),
    Rule("hunyuan_a13b", ("<think>", "<answer>"), ("hunyuan",)),
    Rule("hy_v3", ("think",), ("hy_v",)),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>", "think")),
    Rule("qwen3", ("</think>",), ("qwen", "mimo")),
    Rule("ling3", ("</think>", "<role>ASSISTANT</role>")),
    Rule("glm45", ("</think>",), ("glm",)),
    # Where a template writes the start tag, the parser sees it in the prompt.
    Rule("deepseek_v3", ("</think>",)),
    Rule("deepseek_v3", ("<think>",)),
)


@dataclass(frozen=True)
class ParserNames:
    """The parsers in use; None: none."""

    tools: str | None
    reasoning: str | None

    def __str__(self) -> str:
        return f"tool calls: {self.tools or OFF}, reasoning: {self.reasoning or OFF}"


def choose(rules: Sequence[Rule], template: str, family: str) -> str | None:
    for rule in rules:
        if family.startswith(rule.families) and all(text in template for text in rule.texts):
            return rule.parser
    return None


def parser_names(
    tools: str | None, reasoning: str | None, auto_tools: bool, template: str | None, takes_tools: bool, family: str
) -> ParserNames:
    """`tools` and `reasoning` are what the user gave, if anything; a template that does not take tools cannot tell the
    model of its own format."""
    text = template or ""
    chosen_tools = tools or (choose(TOOL_RULES, text, family) if takes_tools else None) or JSON
    chosen_reasoning = reasoning or choose(REASONING_RULES, text, family)
    return ParserNames(
        chosen_tools if auto_tools and chosen_tools != OFF else None,
        chosen_reasoning if chosen_reasoning != OFF else None,
    )
