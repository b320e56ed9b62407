"""Grammars are compiled once, within limits of memory and time."""

from dataclasses import dataclass

import pytest

from quire.messages.structured import MAX_DEPTH, MAX_REGEX, MAX_TEXT, StructuredOutputsParams
from quire.structured_output.compiler import GrammarCache, GrammarCompiler
from quire.structured_output.registry import BackendRegistry


@dataclass
class Fake:
    num_bytes: int

    def matcher(self) -> None: ...


def test_the_cache_keeps_what_was_used_last() -> None:
    cache = GrammarCache(max_bytes=100, max_count=3)
    for i in range(3):
        cache.put((i,), Fake(30))
    assert cache.get((0,)) is not None
    cache.put((3,), Fake(10))  # one too many: the oldest goes
    assert cache.get((1,)) is None and len(cache) == 3 and cache.num_bytes == 70
    cache.put((4,), Fake(60))
    assert cache.get((4,)) is not None and cache.num_bytes <= 100
    cache.put((5,), Fake(101))
    assert cache.get((5,)) is None


def collect(compiler: GrammarCompiler) -> list:
    found = []
    while not found:
        compiler.wait(5)
        found = compiler.collect()
    return found


def test_equal_grammars_are_compiled_once() -> None:
    calls = []

    def compile(spec: StructuredOutputsParams) -> Fake:
        calls.append(spec.text)
        return Fake(1)

    compiler = GrammarCompiler(compile, seconds=10, cache_bytes=1000)
    schema = StructuredOutputsParams(json={"type": "object", "title": "t"})
    same = StructuredOutputsParams(json='{"type": "object",   "title": "t"}')
    assert schema.key("auto") == same.key("auto")
    assert compiler.request(schema.key("auto"), schema, "a") is None
    assert compiler.request(same.key("auto"), same, "b") is None
    [job] = collect(compiler)
    assert job.waiters == ["a", "b"] and len(calls) == 1 and not compiler.pending
    assert compiler.request(same.key("auto"), same, "c") is job.compiled


def test_whatever_a_library_raises_is_the_requests_error() -> None:
    def compile(spec: StructuredOutputsParams) -> Fake:
        raise MemoryError("too much")

    compiler = GrammarCompiler(compile, seconds=10, cache_bytes=1000)
    spec = StructuredOutputsParams(regex="a")
    compiler.request(spec.key("auto"), spec, "a")
    [job] = collect(compiler)
    assert job.error == "the grammar library failed: MemoryError: too much"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.structured_output.registry.installed", lambda name: False)
    registry = BackendRegistry(lambda: None)  # type: ignore[arg-type,return-value]
    for backend, package in (("auto", "xgrammar"), ("guidance", "llguidance"), ("outlines", "outlines_core")):
        with pytest.raises(ValueError, match=f"pip install {package}"):
            registry.compile(StructuredOutputsParams(regex="a", backend=backend))


DEEP: dict = {}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "exactly one of json, .* got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": "[1]"}, "json must be a JSON object, got list"),
        ({"json": DEEP}, f"nested more than {MAX_DEPTH}"),
        ({"json": {"enum": ["x" * MAX_TEXT]}}, "at most"),
        ({"json": {"a": object()}}, "cannot be written as JSON"),
        ({"regex": "a" * (MAX_REGEX + 1)}, f"regex has {MAX_REGEX + 1} bytes"),
        ({"regex": ""}, "not empty"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": []}, "at least one text"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a"] * 5000}, "at most 4096"),
        ({"grammar": "x" * (MAX_TEXT + 1)}, "grammar has"),
        ({"regex": "a", "backend": "yacc"}, "backend is 'yacc'; allowed: auto"),
        ({"json_object": False}, "got none"),
    ],
)
def test_limits(wanted: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^structured_outputs: .*{message}"):
        StructuredOutputsParams(**wanted)
