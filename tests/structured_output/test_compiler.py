"""Grammars are compiled once, within limits of memory and time."""

import threading
from dataclasses import dataclass

import pytest

from quire.messages.requests import ErrorKind
from quire.messages.structured import MAX_DEPTH, MAX_REGEX, MAX_TEXT, StructuredOutputsParams
from quire.structured_output.backends.base import GrammarBusyError
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.compiler import GrammarCache, GrammarCompiler


@dataclass
class Fake:
    num_bytes: int

    def matcher(self) -> None: ...


def test_the_cache_evicts_the_least_recently_used() -> None:
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
    assert list(job.waiters) == ["a", "b"] and len(calls) == 1 and not compiler.pending
    assert compiler.request(same.key("auto"), same, "c") is job.compiled


def test_whatever_a_library_raises_is_the_requests_error() -> None:
    def compile(spec: StructuredOutputsParams) -> Fake:
        raise MemoryError("too much")

    compiler = GrammarCompiler(compile, seconds=10, cache_bytes=1000)
    spec = StructuredOutputsParams(regex="a")
    compiler.request(spec.key("auto"), spec, "a")
    [job] = collect(compiler)
    assert job.error.message == "the grammar library failed: MemoryError: too much"
    assert job.error.kind == ErrorKind.OUT_OF_MEMORY


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.structured_output.backends.registry.installed", lambda name: False)
    registry = BackendRegistry(lambda: None)  # type: ignore[arg-type,return-value]
    packages = {"auto": "llguidance", "xgrammar": "xgrammar", "guidance": "llguidance", "outlines": "outlines_core"}
    for backend, package in packages.items():
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
        ({"regex": ""}, "non-empty string"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": []}, "a non-empty list"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"choice": ["a"] * 5000}, "at most 4096"),
        ({"grammar": "x" * (MAX_TEXT + 1)}, "grammar has"),
        ({"regex": "a", "backend": "yacc"}, "backend is 'yacc'; allowed: auto"),
        ({"json_object": False}, "got none"),
    ],
)
def test_limits(wanted: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^structured_outputs: .*{message}"):
        StructuredOutputsParams(**wanted)


class Slow:
    """Compiles nothing before its gate opens."""

    def __init__(self) -> None:
        self.gate, self.begun, self.calls = threading.Event(), threading.Semaphore(0), []

    def __call__(self, spec: StructuredOutputsParams) -> Fake:
        self.calls.append(spec.regex)
        self.begun.release()
        self.gate.wait(60)
        return Fake(1)


def ask(compiler: GrammarCompiler, regex: str, request_id: str) -> None:
    spec = StructuredOutputsParams(regex=regex)
    assert compiler.request(spec.key("auto"), spec, request_id) is None


def test_a_grammar_without_waiting_requests_is_not_compiled() -> None:
    slow = Slow()
    compiler = GrammarCompiler(slow, seconds=60, cache_bytes=1000, num_threads=1)
    ask(compiler, "first", "a")
    assert slow.begun.acquire(timeout=60)
    for request_id in ("b", "c"):
        ask(compiler, "left", request_id)
    ask(compiler, "last", "d")
    for request_id in ("b", "a", "c", "unknown"):
        compiler.cancel(request_id)
    slow.gate.set()
    ended = []
    while compiler.pending:
        compiler.wait(5)
        ended += compiler.collect()
    assert slow.calls == ["first", "last"]  # the first had begun: it ends in the cache
    assert [list(job.waiters) for job in ended] == [[], ["d"]]
    assert compiler.request(ended[0].key, ended[0].spec, "e") is not None


def test_the_queue_has_a_limit() -> None:
    slow = Slow()
    compiler = GrammarCompiler(slow, seconds=60, cache_bytes=1000, num_threads=1, max_queue=2)
    ask(compiler, "running", "a")
    assert slow.begun.acquire(timeout=60)
    ask(compiler, "second", "b")
    ask(compiler, "third", "c")
    with pytest.raises(GrammarBusyError, match=r"2 grammars are already queued .*--structured-outputs-max-queue 2"):
        ask(compiler, "fourth", "d")
    ask(compiler, "third", "e")  # needs no place of its own
    compiler.cancel("b")
    ask(compiler, "fourth", "d")
    slow.gate.set()


def test_time_in_the_queue_is_limited() -> None:
    slow = Slow()
    compiler = GrammarCompiler(slow, seconds=60, cache_bytes=1000, num_threads=1, queue_seconds=0.05)
    ask(compiler, "running", "a")
    assert slow.begun.acquire(timeout=60)
    ask(compiler, "waiting", "b")
    [job] = collect(compiler)
    assert list(job.waiters) == ["b"] and job.error.kind == ErrorKind.BUSY
    assert "0.05 seconds (--structured-outputs-queue-seconds)" in job.error.message
    slow.gate.set()
    [job] = collect(compiler)
    assert list(job.waiters) == ["a"] and job.compiled is not None and slow.calls == ["running"]


def test_grammars_are_refused_while_all_compilers_are_stuck() -> None:
    slow = Slow()
    compiler = GrammarCompiler(slow, seconds=0.05, cache_bytes=1000, num_threads=2)
    for name in ("one", "two", "queued"):
        ask(compiler, name, name)
    kinds = {}
    while len(kinds) < 3:
        kinds |= {request_id: job.error.kind for job in collect(compiler) for request_id in job.waiters}
    assert kinds == {"one": ErrorKind.INVALID, "two": ErrorKind.INVALID, "queued": ErrorKind.BUSY}
    with pytest.raises(GrammarBusyError, match="threads are busy with"):
        ask(compiler, "late", "late")
    slow.gate.set()
