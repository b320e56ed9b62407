"""The formats that `--reasoning-parser` knows, under vLLM's names.

Most chat templates write the start tag, or an empty pair of tags where thinking is switched off, at the end of the
prompt; TagFormat.is_open() sees that. `implied` is for models that start reasoning without a start tag.
"""

from quire.entrypoints.parsers.reasoning.tags import TagFormat

THINK = TagFormat()
IMPLIED = TagFormat(implied=True)

FORMATS: dict[str, TagFormat] = {
    "deepseek_r1": IMPLIED,
    "deepseek_v3": THINK,  # V3.1: the template writes <think> or </think>
    "ernie45": IMPLIED,
    "glm45": THINK,
    # Quantized models write "Here's" for "Here is".
    "granite": TagFormat(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "holo2": THINK,
    "hunyuan_a13b": TagFormat(starts=("<think>\n",), ends=("\n</think>\n<answer>\n",), closing=("\n</answer>",)),
    "kimi_k2": TagFormat(implied=True, ends_before=("<|tool_calls_section_begin|>",)),
    "minimax_m2": IMPLIED,
    "mistral": TagFormat(starts=("[THINK]",), ends=("[/THINK]",)),
    "nemotron_v3": THINK,
    "olmo3": IMPLIED,
    # Qwen3.5 may call a tool without an end tag.
    "qwen3": TagFormat(ends_before=("<tool_call>\n<function=",)),
    "seed_oss": TagFormat(starts=("<seed:think>",), ends=("</seed:think>",), implied=True),
    "step3": IMPLIED,
}
FORMATS["glm47"] = FORMATS["glm45"]
FORMATS["kimi"] = FORMATS["kimi_k2"]
FORMATS["minimax"] = FORMATS["minimax_m2"]
FORMATS["hunyuan"] = FORMATS["hunyuan_a13b"]
FORMATS["mimo"] = FORMATS["qwen3"]
