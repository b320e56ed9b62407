"""Put the registry's table of native families into docs/models.md: python benchmarks/native_table.py"""

from pathlib import Path

from quire.entrypoints.cli.models import markdown

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- native: begin -->\n", "\n<!-- native: end -->"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + markdown() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
