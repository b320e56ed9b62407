"""`make mutants`: plants small bugs one at a time in a copy of the tree, and names those that the tests do not notice.

python scripts/mutants.py [WORD ...]    only the bugs whose file or text has one of the words
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants_list import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
COPIED = ("quire", "tests", "docs", "examples", "scripts")
SECONDS = 300  # for the tests of one bug; one that makes them hang has been noticed


def copy_tree(target: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / file, target / file)


def is_noticed(mutant: Mutant, tree: Path) -> bool:
    file = tree / mutant.file
    before = file.read_text("utf-8")
    file.write_text(before.replace(mutant.old, mutant.new), "utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "true", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS)
        return done.returncode == 1
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before, "utf-8")


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.file + m.old + m.new for word in words)]
    alive = []
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as place:
        copy_tree(Path(place))
        for mutant in chosen:
            noticed = is_noticed(mutant, Path(place))
            print(f"{'noticed' if noticed else 'ALIVE  '} {mutant.file}: {mutant.old!r} -> {mutant.new!r}", flush=True)
            if not noticed:
                alive.append(mutant)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} noticed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
