"""The JSON Schema test suite (draft 2020-12) put to backends: what they accept, and what a model writes under it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from quire import LLM, SamplingParams
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import CompiledGrammar, GrammarError
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output.walk import allowed_tokens

DATA = Path(__file__).parent / "data" / "draft2020-12.json"
PROMPT = {"prompt_token_ids": [40, 50, 60, 70, 80]}
MAX_TOKENS = 200
CLOSING = (b'"', b"}", b"]", b'"}', b"}}")
CLOSE_BIAS = 6.0  # a random model hardly ever draws the one token of 300 that ends a text

TYPES = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"},
    "object": {"properties", "patternProperties", "additionalProperties", "required", "propertyNames"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"},
}


@dataclass(slots=True)
class Group:
    """A schema of the suite, with instances that are valid or not."""

    file: str
    name: str
    schema: Any
    tests: list[tuple[Any, bool]]

    @property
    def validator(self) -> jsonschema.Draft202012Validator:
        # By default a format says nothing; backends that take one keep to it.
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER if "format" in self.file else None
        return jsonschema.Draft202012Validator(self.schema, format_checker=checker)


@dataclass(slots=True)
class Counts:
    schemas: int = 0
    accepted: int = 0
    outputs: int = 0
    valid: int = 0
    cut: int = 0  # by max_tokens, up to there as the grammar allows
    valid_instances: int = 0  # of the suite
    valid_accepted: int = 0
    invalid_instances: int = 0  # each in several spellings
    invalid_accepted: int = 0
    wrong: list[str] = field(default_factory=list)


def groups() -> list[Group]:
    return [Group(file, name, schema, tests) for file, name, schema, tests in json.loads(DATA.read_text())["groups"]]


def typed_groups() -> list[Group]:
    """The same schemas with the type their keywords are for, as users write them."""
    found = []
    for group in groups():
        for name in ("integer", *TYPES) if isinstance(group.schema, dict) and "type" not in group.schema else ():
            if group.schema.keys() & TYPES.get(name, TYPES["number"]):
                one = Group(group.file, f"{group.name}, {name}", {"type": name} | group.schema, [])
                validator = one.validator
                try:
                    one.tests = [(data, valid and validator.is_valid(data)) for data, valid in group.tests]
                except Exception:  # what it refers to is not here
                    continue
                found.append(one)
    return found


def compile_group(registry: BackendRegistry, group: Group, backend: str) -> CompiledGrammar | str:
    """The grammar, or why there is none."""
    try:
        return registry.compile(StructuredOutputsParams(json=group.schema, backend=backend))
    except (GrammarError, ValueError) as error:
        return str(error)


def check_instances(compiled: CompiledGrammar, group: Group, vocabulary: Vocabulary, counts: Counts) -> None:
    """No spelling of an invalid instance may pass. Valid ones may be refused: an object can be kept to its names."""
    for instance, valid in group.tests:
        if valid:
            counts.valid_instances += 1
            counts.valid_accepted += any(accepts(compiled, vocabulary, text) for text in _plain(instance))
            continue
        accepted = [text for text in spellings(instance) if accepts(compiled, vocabulary, text)]
        counts.invalid_instances += 1
        counts.invalid_accepted += bool(accepted)
        counts.wrong += [f"{group.file}: {group.name}: accepts {text}" for text in accepted]


def accepts(compiled: CompiledGrammar, vocabulary: Vocabulary, text: str) -> bool:
    matcher = compiled.matcher()
    by_byte = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    if not all(matcher.accept(by_byte[bytes([byte])]) for byte in text.encode()):
        return False
    return vocabulary.end_id in allowed_tokens(matcher, vocabulary)


def spellings(instance: Any) -> Iterator[str]:
    """The same instance written in several ways."""
    yield from _plain(instance)
    yield json.dumps(instance, ensure_ascii=True)
    yield _spell(instance, lambda text: '"' + "".join(map(_escaped, text)) + '"', ".0")
    yield _spell(instance, lambda text: json.dumps(text, ensure_ascii=False), "e0")


def _plain(instance: Any) -> Iterator[str]:
    yield json.dumps(instance, ensure_ascii=False)
    yield json.dumps(instance, ensure_ascii=False, separators=(",", ":"))


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _spell(part: Any, string: Any, tail: str) -> str:
    if isinstance(part, dict):
        return "{" + ",".join(f"{string(name)}:{_spell(value, string, tail)}" for name, value in part.items()) + "}"
    if isinstance(part, list):
        return "[" + ",".join(_spell(value, string, tail) for value in part) + "]"
    if isinstance(part, str):
        return str(string(part))
    return f"{part}{tail}" if type(part) is int else json.dumps(part)


def params(group: Group, backend: str, seed: int, vocabulary: Vocabulary) -> SamplingParams:
    """Every fourth output is free of bias and mostly cut; the others lean towards tokens that close."""
    closing = {i: CLOSE_BIAS for i, token in enumerate(vocabulary.tokens) if token in CLOSING}
    return SamplingParams(
        temperature=1.5,
        seed=seed,
        max_tokens=MAX_TOKENS,
        logit_bias=closing | {vocabulary.end_id: CLOSE_BIAS} if seed % 4 else None,
        structured_outputs=StructuredOutputsParams(json=group.schema, backend=backend),
    )


def generate(
    llm: LLM,
    served: Sequence[tuple[Group, CompiledGrammar]],
    backend: str,
    seeds: range,
    vocabulary: Vocabulary,
    counts: Counts,
) -> None:
    wanted = [(group, compiled, seed) for group, compiled in served for seed in seeds]
    asked = [params(group, backend, seed, vocabulary) for group, _, seed in wanted]
    for (group, compiled, _), output in zip(
        wanted, llm.generate([PROMPT] * len(asked), asked, use_tqdm=False), strict=True
    ):
        completion = output.outputs[0]
        counts.outputs += 1
        if completion.finish_reason == "length":
            counts.cut += 1
            matcher = compiled.matcher()
            wrong = None if all(map(matcher.accept, completion.token_ids)) else "is cut, and no beginning"
        else:
            wrong = output.error or fault(group, completion.text)
            counts.valid += wrong is None
        if wrong is not None:
            counts.wrong.append(f"{group.file}: {group.name}: {completion.text!r} {wrong}")


def fault(group: Group, text: str) -> str | None:
    try:
        instance = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return f"is not JSON: {error}"
    error = next(group.validator.iter_errors(instance), None)
    return None if error is None else f"is not valid: {error.message}"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
