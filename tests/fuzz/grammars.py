"""Mutated structured-output constraints: compiled, then advanced a few tokens. An input is the JSON of
StructuredOutputsParams' fields; bytes that are not JSON are a grammar."""

import functools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fuzz.child import ChildTarget
from tests.fuzz.mutate import Raw, dumps, mutated_text, mutated_value, nested

if TYPE_CHECKING:
    from quire.structured_output.backends.registry import BackendRegistry

SECONDS = 30.0  # above the engine's compile timeout
MEGABYTES = 1024
STEPS = 24
KEYWORDS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 5, 2**31, 2**63, 2**70, 0.5, Raw("1e999"), Raw("NaN")),
    *("", "x", [], {}, [[]], {"": {}}),
    *({"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "http://127.0.0.1:9/"}, {"$ref": "#/properties/x"}),
    *({"type": "string", "pattern": "(a{0,500}){0,500}"}, {"type": "string", "maxLength": 100000}),
    *({"type": "array", "minItems": 100000}, {"type": "integer", "minimum": 10**30, "multipleOf": 1e-9}),
    *({"anyOf": []}, {"enum": []}, {"enum": list(range(500))}, {"not": {}}, {"allOf": [{"type": "null"}] * 30}),
    *({"type": "object", "properties": {f"p{i}": {} for i in range(200)}}, {"patternProperties": {"(": {}}}),
    *(nested(60), nested(3000), "object", "string", ["string", "null", "string"], "\x00", Raw('"\\ud800"'), "é" * 100),
)
WORDS = (
    *("*", "+", "?", "{0,1000}", "{1000}", "{2,1}", "(", ")", "[", "]", "[^", "(?=", "(?!", "(?<", "(?:", "\\1", "\\b"),
    *("\\p{L}", "\\u{110000}", "|", "^", "$", ".", ".*", "(a*)*", "[\\s\\S]", "[z-a]", "\\", "\x00", "é", "😀"),
    *("\\d{50}", "::=", "root", "root root", '""', '"a"', "start:", "start: start", "%import", "%ignore", "<[", "/(/"),
    *("->", "\n", "#"),
)


def seeds() -> list[dict[str, Any]]:
    from tests.entrypoints.openai.hostile import CASES
    from tests.structured_output import cases

    found: list[dict[str, Any]] = [{"json": schema} for schema in cases.SCHEMAS.values()]
    found += [{"regex": regex} for regex in cases.REGEXES] + [{"choice": ["a", "b c", 'q"']}, {"json_object": True}]
    found += [{"grammar": grammar} for grammar in (*cases.EBNF, *cases.LARK)]
    found += [{"structural_tag": cases.TRIGGERED}]
    found += [{kind: value} for kind, value, *_ in CASES.values() if len(json.dumps(value)) < 2000]
    return found


class GrammarTarget(ChildTarget):
    name = "grammar"
    function, seconds, megabytes = "tests.fuzz.grammars:compile_and_walk", SECONDS, MEGABYTES

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        forms = seeds()
        while True:
            yield mutated_form(rng, rng.choice(forms)).encode("utf-8", "replace")


def mutated_form(rng: random.Random, form: dict[str, Any]) -> str:
    made = dict(form)
    for kind, value in form.items():
        for _ in range(rng.choice([1, 1, 2, 3])):
            value = mutated_text(rng, value, WORDS) if isinstance(value, str) else mutated_value(rng, value, KEYWORDS)
        made[kind] = value
    if rng.random() < 0.5:
        made["backend"] = rng.choice(["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"])
    if rng.random() < 0.1:
        made[rng.choice(["disable_any_whitespace", "disable_additional_properties"])] = True
    if rng.random() < 0.1:
        made["whitespace_pattern"] = mutated_text(rng, "[ \n]?", WORDS)
    return dumps(made)


@functools.cache
def registry() -> "BackendRegistry":
    from quire.structured_output.backends.registry import BackendRegistry
    from tests.structured_output.model import save_model, vocabulary_of

    folder = tempfile.TemporaryDirectory(prefix="quire-fuzz-")
    vocabulary = vocabulary_of(save_model(Path(folder.name)))
    folder.cleanup()
    return BackendRegistry(lambda: vocabulary)


def compile_and_walk(data: bytes) -> str:
    """Runs in the child. Must succeed or raise a ValueError, such as GrammarError."""
    from quire.messages.structured import as_structured
    from tests.structured_output.walk import allowed_tokens

    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = {"grammar": data.decode("utf-8", "replace")}
    rng = random.Random(data)
    try:
        spec = as_structured(fields if isinstance(fields, dict) else {"json": fields})
        assert spec is not None
        vocabulary = registry().vocabulary
        matcher = registry().compile(spec).matcher()
        accepted = 0
        for _ in range(STEPS):
            allowed = allowed_tokens(matcher, vocabulary)
            token = rng.choice(allowed) if allowed else vocabulary.end_id  # an engine fails such a request
            if token == vocabulary.end_id:
                break
            if not matcher.accept(token):
                break  # e.g. a grammar without an end; an engine fails such a request
            accepted += 1
        matcher.rollback(rng.randrange(accepted + 1))
        matcher.fill(np.zeros(vocabulary.num_words, np.int32))
    except ValueError:
        pass
    return ""
