"""The JSON Schema test suite: what a backend accepts it keeps, and what it would leave out it refuses.

All schemas and instances here; outputs of a model for some of them. `suite_table` has outputs for all.
"""

import random

import pytest

from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output import suite
from tests.structured_output.model import open_engine

BACKENDS = ("auto", "xgrammar", "guidance", "outlines")
GROUPS = [*suite.groups(), *suite.typed_groups()]
SAMPLE = {"auto": 120, "xgrammar": 60, "guidance": 60, "outlines": 30}


@pytest.fixture(scope="module")
def registry(vocabulary: Vocabulary) -> BackendRegistry:
    return BackendRegistry(lambda: vocabulary)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_invalid_instance_passes(registry: BackendRegistry, vocabulary: Vocabulary, backend: str) -> None:
    counts = suite.Counts()
    for group in GROUPS:
        compiled = suite.compile_group(registry, group, backend)
        if not isinstance(compiled, str):
            counts.accepted += 1
            suite.check_instances(compiled, group, vocabulary, counts)
    assert not counts.wrong
    assert counts.accepted >= {"auto": 400, "xgrammar": 150, "guidance": 400, "outlines": 50}[backend]
    assert counts.valid_accepted > 0.7 * counts.valid_instances


@pytest.mark.parametrize("backend", (*BACKENDS, "lm-format-enforcer"))
def test_a_refusal_says_why(registry: BackendRegistry, backend: str) -> None:
    for group in GROUPS:
        reason = suite.compile_group(registry, group, backend)
        if isinstance(reason, str):
            named = ("xgrammar: ", "guidance: ") if backend == "auto" else (f"{backend}: ",)
            nothing = "allows no" in reason  # the schema false
            assert nothing or ("cannot be enforced" in reason and all(name in reason for name in named)), reason


def test_a_model_writes_what_is_valid(tiny: str, registry: BackendRegistry, vocabulary: Vocabulary) -> None:
    with open_engine(tiny) as llm:
        for backend, count in SAMPLE.items():
            served = []
            for group in GROUPS:
                compiled = suite.compile_group(registry, group, backend)
                if not isinstance(compiled, str):
                    served.append((group, compiled))
            counts = suite.Counts()
            suite.generate(llm, random.Random(backend).sample(served, count), backend, range(2, 4), vocabulary, counts)
            assert not counts.wrong
            assert counts.valid > 0.8 * counts.outputs
