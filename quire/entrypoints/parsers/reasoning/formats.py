"""The formats that `--reasoning-parser` knows, under vLLM's names.

Most chat templates write the start tag, or an empty pair of tags where thinking is switched off, at the end of the
prompt; is_open() sees that. `implied` is for models that start reasoning without a start tag.
"""

from quire.entrypoints.parsers.reasoning.channels import ChannelFormat, KeptFormat
from quire.entrypoints.parsers.reasoning.tags import SuffixedFormat, TagFormat

THINK = TagFormat()
IMPLIED = TagFormat(implied=True)

FORMATS: dict[str, TagFormat] = {
    "deepseek_r1": IMPLIED,
    "deepseek_v3": THINK,  # V3.1: the template writes <think> or </think>
    "ernie45": TagFormat(implied=True, closing=("<response>\n", "\n</response>")),
    "gemma4": TagFormat(starts=("<|channel>thought\n",), ends=("<channel|>",), ends_before=("<|tool_call>",)),
    # Quantized models write "Here's" for "Here is".
    "granite": TagFormat(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "hunyuan_a13b": TagFormat(starts=("<think>\n",), ends=("\n</think>\n<answer>\n",), closing=("\n</answer>",)),
    "hy_v3": SuffixedFormat(),
    "k2_horizon": TagFormat(
        starts=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ends=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        ends_before=("<ifm|tool_calls>",),
    ),
    "kimi_k2": TagFormat(implied=True, ends_before=("<|tool_calls_section_begin|>",)),
    "ling3": TagFormat(ends_before=("<tool_call>",)),
    "minimax_m3": TagFormat(starts=("<mm:think>",), ends=("</mm:think>",)),
    "mistral": TagFormat(starts=("[THINK]",), ends=("[/THINK]",)),
    "plamo3": TagFormat(
        starts=("<|plamo:begin_think:plamo|>",),
        ends=("<|plamo:end_think:plamo|>",),
        ends_before=("<|plamo:begin_tool_requests:plamo|>",),
        tokens=("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
    ),
    # Qwen3.5 may call a tool without an end tag.
    "qwen3": TagFormat(ends_before=("<tool_call>\n<function=",)),
    "seed_oss": TagFormat(starts=("<seed:think>",), ends=("</seed:think>",), implied=True),
}
# Models that write another family's tags.
ALIASES = {
    "deepseek_v4": "deepseek_v3",
    "deepseek_v41": "deepseek_v3",
    "glm45": "deepseek_v3",
    "glm47": "deepseek_v3",
    "granite_thinking_parser": "deepseek_v3",
    "holo2": "deepseek_v3",
    "hunyuan": "hunyuan_a13b",
    "hy_v4": "hy_v3",
    "kimi": "kimi_k2",
    "mimo": "qwen3",
    "minicpmv": "deepseek_v3",
    "minimax": "deepseek_r1",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "deepseek_v3",
    "olmo3": "deepseek_r1",
    "poolside_v1": "deepseek_v3",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}
FORMATS |= {alias: FORMATS[name] for alias, name in ALIASES.items()}

# Reasoning that is not between two tags.
OTHER_FORMATS: dict[str, ChannelFormat | KeptFormat] = {
    "cohere_command3": ChannelFormat("<|START_THINKING|>", "<|END_THINKING|>", "cohere_command3"),
    "inkling": ChannelFormat("<|content_thinking|>", "<|content_text|>", "inkling", headed=True),
    "kimi_k3": ChannelFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>", "kimi_k3", implied=True),
    "minimax_m2_append_think": KeptFormat(),
    "muse_glimmer": ChannelFormat("to=self<|message|>", "to=user<|message|>", "muse_glimmer", headed=True),
    "openai_gptoss": ChannelFormat(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "openai", headed=True
    ),
}
OTHER_FORMATS["cohere_command4"] = OTHER_FORMATS["cohere_command3"]
NOT_YET = ("hf",)  # it reads the tokenizer's response template
