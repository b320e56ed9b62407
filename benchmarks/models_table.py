"""Put what tests/models/transformers_sweep.py found into docs/models.md: python benchmarks/models_table.py"""

import json
from pathlib import Path
from typing import Any

from quire.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "models" / "data" / "transformers.json"
BEGIN, END = "<!-- transformers: begin -->\n", "\n<!-- transformers: end -->"
WORKS = "works"


def section(report: dict[str, Any]) -> str:
    models = report["models"]
    works = sorted({each["architecture"] for each in models.values() if each["result"] == WORKS})
    others = [name for name in works if name not in ARCHITECTURES]
    lines = [
        f"Of the {len(models)} kinds of causal language model in transformers {report['transformers']}, "
        f"{len(works)} classes work, {len(others)} of them none of ours:",
        "",
        ", ".join(f"`{name}`" for name in others) + ".",
        "",
        "| does not work | why |",
        "|---|---|",
    ]
    lines += [
        f"| `{each['architecture']}` | {each['result'].replace('|', ' ')} |"
        for each in sorted({each["architecture"]: each for each in models.values()}.values(), key=_name)
        if each["architecture"] not in works
    ]
    return "\n".join(lines)


def _name(each: dict[str, str]) -> str:
    return each["architecture"].lower()


def rewritten(page: str, report: dict[str, Any]) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + section(report) + END + after


def main() -> None:
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    main()
