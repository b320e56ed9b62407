"""Write the tables of docs/models.md: built-in families, and what tests/models/transformers_sweep.py found.

python -m scripts.models_page
"""

import json
from pathlib import Path
from typing import Any

from quire.entrypoints.cli.models import HEADINGS, built_in_rows
from quire.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "tests" / "models" / "data" / "transformers.json"
WORKS = "works"


def built_in_table() -> str:
    lines = ["| " + " | ".join(HEADINGS.values()) + " |", "|" + "---|" * len(HEADINGS)]
    for row in built_in_rows():
        row |= {"architecture": f"`{row['architecture']}`", "gguf": row["gguf"] and f"`{row['gguf']}`"}
        lines.append("| " + " | ".join(row[name] for name in HEADINGS) + " |")
    return "\n".join(lines)


def transformers_section(report: dict[str, Any]) -> str:
    models = report["models"]
    works = sorted({each["architecture"] for each in models.values() if each["result"] == WORKS})
    others = [name for name in works if name not in ARCHITECTURES]
    lines = [
        f"Of the {len(models)} kinds of causal language model in transformers {report['transformers']}, "
        f"{len(works)} classes work, {len(others)} of which are not built in:",
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


def with_tables(page: str) -> str:
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, table in (("built-in", built_in_table()), ("transformers", transformers_section(report))):
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = before + begin + table + end + after
    return page


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
