"""The list of `make mutants` keeps up with the code."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_bug_can_still_be_planted(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from mutants_list import MUTANTS

    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text("utf-8").count(mutant.old) == 1, (mutant.file, mutant.old)
        assert mutant.new != mutant.old
        assert mutant.tests and all((ROOT / test).exists() for test in mutant.tests), mutant.tests
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
