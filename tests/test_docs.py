"""Links and commands in the docs lead somewhere; copied code and generated tables match their sources."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import performance_tables
from quire.quantization.select import FORMATS
from scripts import models_page, quantization_page

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """GitHub's: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(without_code(page)):
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), f"{path} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{path} has no heading #{anchor}"


def test_modules_named_in_the_docs_exist() -> None:
    # Results keep the commands of their day.
    pages = [page.read_text("utf-8") for page in PAGES if "results" not in page.parts]
    found = {name for page in pages for name in re.findall(r"python3? -m\s+([\w.]+\w)", page)}
    missing = [name for name in sorted(found) if not is_module(name)]
    assert found and not missing, missing


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent of it
        return False


def test_modules_that_do_not_exist_are_seen() -> None:
    assert is_module("tests.entrypoints.http.attacks")
    assert not is_module("tests.entrypoints.http.nowhere") and not is_module("nowhere.attacks")


def test_the_example_of_a_model_is_the_file() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-model.md").read_text("utf-8"), re.DOTALL)
    source = (ROOT / "quire" / "models" / "glm.py").read_text("utf-8")
    imports, rest = source.split("\n\nLAYER, OURS", 1)
    assert example == "LAYER, OURS" + rest and "class" not in imports


@pytest.mark.parametrize("table", [performance_tables.h200, performance_tables.h200_server, performance_tables.cpu])
def test_the_performance_page_has_the_committed_results(table: Callable[[], str]) -> None:
    assert table() in performance_tables.PAGE.read_text("utf-8"), "run `make figures`"


def test_the_page_of_models_has_the_registry_and_the_results_of_the_sweep() -> None:
    page = models_page.PAGE.read_text("utf-8")
    assert models_page.with_tables(page) == page, "run `python -m scripts.models_page`"


def test_the_page_of_quantization_has_what_the_code_chooses_and_the_measurements() -> None:
    page = quantization_page.PAGE.read_text("utf-8")
    assert quantization_page.with_table(page) == page, "run `python -m scripts.quantization_page`"
    assert {config["quant_method"] for _, config, _ in quantization_page.ROWS if config} == set(FORMATS)
