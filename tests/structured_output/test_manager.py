"""An exception in a grammar library fails only the request with that grammar."""

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, ErrorKind
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError
from quire.structured_output.manager import StructuredOutputManager
from quire.structured_output.vocabulary import Vocabulary


class Panic(BaseException):
    """What a Rust library raises."""


@dataclass
class Fragile:
    """A grammar, and its own matcher, that allows everything until it raises."""

    raises: dict[str, BaseException] = field(default_factory=dict)
    num_bytes: int = 1

    def matcher(self) -> "Fragile":
        self._may_raise("matcher")
        return self

    def accept(self, token: int) -> bool:
        self._may_raise("accept")
        return True

    def rollback(self, count: int) -> None:
        self._may_raise("rollback")

    def fill(self, row: np.ndarray) -> None:
        self._may_raise("fill")
        row[:] = -1

    def _may_raise(self, method: str) -> None:
        if method in self.raises:
            raise self.raises[method]


class Registry:
    """Each grammar by its text."""

    def __init__(self, vocabulary: Vocabulary, grammars: dict[str, Fragile]) -> None:
        self.vocabulary = vocabulary
        self.grammars = grammars

    def backend_name(self, spec: StructuredOutputsParams) -> str:
        return "auto"

    def compile(self, spec: StructuredOutputsParams) -> Any:
        return self.grammars[spec.text]


def started(vocabulary: Vocabulary, grammars: dict[str, Fragile]) -> StructuredOutputManager:
    manager = StructuredOutputManager(Registry(vocabulary, grammars), vocabulary.size)  # type: ignore[arg-type]
    for index, name in enumerate(grammars):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=name))
        request = EngineCoreRequest(name, index, np.zeros(1, np.int32), params, (vocabulary.end_id,), 0, 0.0)
        manager.add(request)
    while manager.pending:
        manager.compiler.wait(5)
        manager.ready()
    return manager


def outputs(tokens: dict[int, int]) -> EngineCoreOutputs:
    got = EngineCoreOutputs.ended(list(tokens), 0)  # type: ignore[arg-type]
    got.token_ids = np.array(list(tokens.values()), np.int32)
    got.offsets = np.arange(len(tokens) + 1, dtype=np.int32)
    return got


@pytest.mark.parametrize("error", [RuntimeError("of a library"), Panic("of a library"), MemoryError("of a library")])
@pytest.mark.parametrize("method", ["matcher", "fill", "rollback", "accept"])
def test_one_request_fails_alone(
    vocabulary: Vocabulary, error: BaseException, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"a": Fragile(), "broken": Fragile({method: error}), "c": Fragile()}
    with caplog.at_level(logging.ERROR):
        manager = started(vocabulary, names)
        mask = manager.fill([(0, 0), (1, 1), (2, 2)], {1: [5]})
        manager.advance(outputs({0: 5, 1: 5, 2: 5}))
    [failure] = manager.failures
    assert failure.request_id == "broken" and "structured_outputs: the grammar library failed" in failure.error.message
    assert failure.error.kind in (ErrorKind.INTERNAL, ErrorKind.OUT_OF_MEMORY)
    assert "'broken' failed" in caplog.text and "Traceback" in caplog.text
    assert mask is not None and {0, 2} <= set(mask.places.tolist())
    if method != "accept":  # it shows only after the masks were made
        assert 1 not in mask.places
    again = manager.fill([(0, 0), (1, 1), (2, 2)])
    assert again is not None and again.places.tolist() == [0, 2]


def test_grammar_errors_are_reported_to_the_client(vocabulary: Vocabulary) -> None:
    manager = started(vocabulary, {"wrong": Fragile({"fill": GrammarError("it became too complex")})})
    manager.fill([(0, 0)])
    assert manager.failures[0].error.kind == ErrorKind.INVALID
    assert manager.failures[0].error.message == "structured_outputs: it became too complex"


def test_an_interrupt_fails_no_request(vocabulary: Vocabulary) -> None:
    manager = started(vocabulary, {"a": Fragile({"fill": KeyboardInterrupt()})})
    with pytest.raises(KeyboardInterrupt):
        manager.fill([(0, 0)])
