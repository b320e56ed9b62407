"""Inputs that once failed pass now, and so do a few new ones."""

import itertools
import random

import pytest

from tests.fuzz.target import TARGETS, Target, corpus_files, load_target

NEW_CASES = {"http": 80, "socket": 20, "template": 30, "grammar": 20}  # `make fuzz` has any number


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    try:
        target = load_target(name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    broken: list[str] = []
    try:
        check_all(target, broken)
    except AssertionError as error:  # from the final checks
        broken.append(str(error))
    assert not broken, "\n".join(broken)


def check_all(target: Target, broken: list[str]) -> None:
    with target:
        new = itertools.islice(target.cases(random.Random(0)), NEW_CASES.get(target.name, 20))
        inputs = [(file.name, file.read_bytes()) for file in corpus_files(target.name)]
        for label, data in [*inputs, *((f"new case {i}", data) for i, data in enumerate(new))]:
            try:
                target.check(data)
            except AssertionError as error:
                broken.append(f"{label}: {error}\n{data[:300]!r}")
