"""The JSON Schema test suite: what a backend accepts it keeps, and what it would leave out it refuses.

All schemas and instances here; outputs of a model for some of them. `suite_table` has outputs for all.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest

from quire.structured_output.backends.base import CompiledGrammar
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output import suite
from tests.structured_output.model import open_engine

BACKENDS = ("auto", "xgrammar", "guidance", "outlines")
GROUPS = [*suite.groups(), *suite.typed_groups()]
SAMPLE = {"auto": 60, "xgrammar": 30, "guidance": 30, "outlines": 15}

CompiledBy = Callable[[str], list[tuple[suite.Group, CompiledGrammar | str]]]


@pytest.fixture(scope="module")
def registry(vocabulary: Vocabulary) -> BackendRegistry:
    return BackendRegistry(lambda: vocabulary)


@pytest.fixture(scope="module")
def compiled_by(registry: BackendRegistry) -> CompiledBy:
    """Every group with its grammar, or why there is none: by backend, once."""
    return cache(lambda backend: [(group, suite.compile_group(registry, group, backend)) for group in GROUPS])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_invalid_instance_passes(compiled_by: CompiledBy, vocabulary: Vocabulary, backend: str) -> None:
    counts = suite.Counts()
    for group, compiled in compiled_by(backend):
        if not isinstance(compiled, str):
            counts.accepted += 1
            suite.check_instances(compiled, group, vocabulary, counts)
    assert not counts.wrong
    assert counts.accepted >= {"auto": 400, "xgrammar": 150, "guidance": 400, "outlines": 50}[backend]
    assert counts.valid_accepted > 0.7 * counts.valid_instances


@pytest.mark.parametrize("backend", (*BACKENDS, "lm-format-enforcer"))
def test_a_refusal_says_why(compiled_by: CompiledBy, backend: str) -> None:
    for _, reason in compiled_by(backend):
        if isinstance(reason, str):
            named = ("xgrammar: ", "guidance: ") if backend == "auto" else (f"{backend}: ",)
            nothing = "allows no" in reason  # the schema false
            assert nothing or ("cannot be enforced" in reason and all(name in reason for name in named)), reason


def test_a_model_writes_what_is_valid(tiny: str, compiled_by: CompiledBy, vocabulary: Vocabulary) -> None:
    with open_engine(tiny) as llm:
        for backend, count in SAMPLE.items():
            served = [(group, made) for group, made in compiled_by(backend) if not isinstance(made, str)]
            counts = suite.Counts()
            suite.generate(llm, random.Random(backend).sample(served, count), backend, range(2, 4), vocabulary, counts)
            assert not counts.wrong
            assert counts.valid > 0.8 * counts.outputs
