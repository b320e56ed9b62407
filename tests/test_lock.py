"""requirements-lock.txt is what pyproject.toml asks for, and nothing in it goes without a hash."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = (ROOT / "requirements-lock.txt").read_text()


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes by name."""
    entries = TEXT.replace(" \\\n", " ").splitlines()
    found = {}
    for entry in entries:
        if entry and not entry.startswith("#"):
            match = re.match(r"(\S+)==(\S+)", entry)
            assert match is not None, entry
            found[canonicalize_name(match[1])] = match[2], entry.count("--hash=sha256:")
    return found


def test_every_dependency_is_locked_to_a_version_that_satisfies_it() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["test"], *extras["fasthash"], *extras["model"]]
    found = locked()
    for requirement in map(Requirement, [*wanted, *PROJECT["build-system"]["requires"]]):
        if requirement.name != "torch":
            version, _ = found[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement} but {version} is locked: run `make lock`"


def test_all_have_hashes_and_none_says_where_it_comes_from() -> None:
    assert all(count for _, count in locked().values())
    assert "://" not in TEXT and "index" not in TEXT


def test_torch_is_the_users_choice_but_what_it_needs_is_locked() -> None:
    assert "torch" not in locked()
    assert {"filelock", "sympy", "networkx", "fsspec", "jinja2", "typing-extensions"} <= locked().keys()
    pinned = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    assert f"TORCH := {pinned}\n" in (ROOT / "Makefile").read_text()
