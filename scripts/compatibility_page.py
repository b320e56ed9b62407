"""Write docs/compatibility.md from the table of vLLM's flags.

python -m scripts.compatibility_page
"""

import json
import textwrap
from pathlib import Path

from quire.config.environment import OPTION_DEFAULTS, TRUE_ALREADY, VARIABLES
from quire.config.fields import flag
from quire.config.vllm.table import OTHER_NAMES, SHORT, TABLE, Row

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
ABOUT = {
    "works": "as in vLLM; the test observes what it changes",
    "accepted": "true here already, or without meaning; it never changes what a model generates, and is named once in "
    "the log",
    "not yet": "refused with the feature's name, except with a value that asks for nothing",
}
INTRO = """\
# Compatibility with vLLM

A command line of `vllm serve` 0.32 and the arguments of its `LLM` and `EngineArgs` work here unchanged. This page is
made by `python -m scripts.compatibility_page` from the table that the command line itself reads (`quire/config/vllm/`);
`tests/compat/` compares that with vLLM's own names. What vLLM's own online tests say of this server:
[vllm_tests.md](vllm_tests.md).
"""
# Defaults that differ: the flag, here, in vLLM.
DIFFERENT = {
    "host": ("127.0.0.1", "all addresses; `--host 0.0.0.0`"),
    "model": ("the embedded SmolLM2", "a model of the hub"),
    "enable_auto_tool_choice": ("on, with a parser for the model's format", "off"),
    "shutdown_timeout": ("30 s for running requests", "0"),
    "allowed_methods": ("GET and POST", "all"),
    "h11_max_incomplete_event_size": ("64 KiB", "4 MiB"),
    "renderer_num_workers": ("2", "1"),
    "block_size": ("16", "by backend"),
    "gpu_memory_utilization": ("0.9", "0.92"),
}
# Written differently, with the same meaning: None where vLLM decides, and what is on without being asked for.
SAME_MEANING = {
    "allowed_headers",
    "api_server_count",
    "async_scheduling",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "profiler_config",
    "uvicorn_log_level",
}
INSTALLED = """\
## Compared with vLLM itself

`make test-compat` installs vLLM 0.32.0's CPU build in an environment of its own and compares with its argparse,
dataclass and pydantic objects: every spelling and choice of {flags} flags is taken, or refused with the feature's name;
every default is taken, and those that differ are the ones below; {engine_args} engine arguments; every field of
requests; the order and defaults of `SamplingParams`; the methods of `LLM` and their arguments. Last run: {date}, all
of it agreed.
"""
COMPARED = "2026-11-16"
SYNTAX = """\
## Syntax

- Underscores for dashes (`--max_model_len`), `--flag=value`, `None` for no value.
- Sizes: `8k` is 8000, `8K` is 8192, `1.5M`; of every whole number.
- Keys of an object: `--hf-overrides.rope_theta 1e6`; of a list: `--compilation-config.cudagraph_capture_sizes+ 1,2`.
- `--config FILE.yaml`: flags as `name: value`; the command line has precedence.
- Precisions `half`, `float`, `torch.bfloat16`; formats `hf`; hashes `sha256_cbor`, `xxhash_cbor`; attention backends
  `TRITON_ATTN`, `CPU_ATTN`, `TORCH_SDPA`.
- `-O0` to `-O3`, and:
"""


def page() -> str:
    counts = {status: sum(row.status == status for row in TABLE.values()) for status in ABOUT}
    summary = ["| | flags and arguments | |", "|---|---|---|"]
    summary += [f"| {status} | {counts[status]} | {about} |" for status, about in ABOUT.items()]
    other = {flag(old): new for old, new in OTHER_NAMES.items()}
    names = ", ".join(f"`{word}` {flag(name)}" for word, name in (SHORT | other).items())
    short = textwrap.fill(names, 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    parts = [
        INTRO,
        "\n".join(summary) + "\n",
        SYNTAX + short + "\n",
        _compared(),
        _defaults(),
        *(_section(s) for s in ABOUT),
    ]
    return "\n".join([*parts, _environment()])


def _compared() -> str:
    names = json.loads((ROOT / "tests" / "compat" / "vllm_names.json").read_text("utf-8"))
    counts = {name: len(names[name]) for name in ("flags", "engine_args")}
    return INSTALLED.format(**counts, date=COMPARED)


def _defaults() -> str:
    lines = [f"| `{flag(name)}` | {here} | {there} |" for name, (here, there) in DIFFERENT.items()]
    keys = "With keys, every path is guarded except `--open-paths`; vLLM guards `/v1` and a few others."
    return "\n".join(["## Defaults that differ", "", "| flag | here | vLLM |", "|---|---|---|", *lines, "", keys, ""])


def _section(status: str) -> str:
    rows = [row for row in TABLE.values() if row.status == status]
    if status == "works":
        lines = [f"| `{flag(row.name)}` | `tests/{row.note}` |" for row in sorted(rows, key=_name)]
        return "\n".join([f"## {status.capitalize()}", "", "| flag | test |", "|---|---|", *lines, ""])
    heading = {"accepted": "reason", "not yet": "feature"}[status]
    lines = [f"| {note} | {', '.join(_shown(row) for row in rows if row.note == note)} |" for note in _notes(rows)]
    return "\n".join([f"## {status.capitalize()}", "", f"| {heading} | flags |", "|---|---|", *lines, ""])


def _environment() -> str:
    read = [variable.name for variable in VARIABLES if variable.name.startswith("VLLM_")]
    return "\n".join(
        [
            "## Environment variables",
            "",
            f"{len(read)} of vLLM's variables have a meaning here ([list](environment.md#vllms-variables)), "
            f"{len(OPTION_DEFAULTS)} of them as the default of a flag. {len(TRUE_ALREADY)} ask for what is so already. "
            "All others are named once at start-up if they are set, or are an error with "
            "`--fail-on-environ-validation`.",
            "",
        ]
    )


def _notes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.note for row in rows))


def _shown(row: Row) -> str:
    name = f"`{flag(row.name) if not row.name.startswith('_') else row.name}`"
    return (
        f"{name} ({', '.join(f'`{value or repr(value)}`' for value in row.neutral)} is allowed)"
        if row.neutral
        else name
    )


def _name(row: Row) -> str:
    return row.name


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
