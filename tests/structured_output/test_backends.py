"""Whatever the masks allow is right, in every backend; what a backend would not keep exactly is refused."""

import json
import random
import re
from collections.abc import Callable

import jsonschema
import pytest

from quire.structured_output.backends.base import CompiledGrammar, GrammarError
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output.cases import EBNF, LARK, REGEXES, SCHEMAS, TRIGGERED, UNSUPPORTED
from tests.structured_output.walk import allowed_tokens, draw

Compile = Callable[..., CompiledGrammar]
BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
OUTPUTS = 4


def valid(instance: object, schema: dict[str, object]) -> bool:
    kind = jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(instance)


def compile_or_skip_refused(compile: Compile, backend: str, **wanted: object) -> CompiledGrammar | None:
    """Backends may refuse, but `auto` must find one."""
    try:
        return compile(backend=backend, **wanted)
    except GrammarError:
        assert backend != "auto"
        return None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_validate(compile: Compile, vocabulary: Vocabulary, backend: str, name: str) -> None:
    schema = SCHEMAS[name]
    compiled = compile_or_skip_refused(compile, backend, json=schema)
    rng = random.Random(name)
    for draft in range(OUTPUTS if compiled is not None else 0):
        text = draw(compiled, vocabulary, rng, draft=draft % 3)
        assert valid(json.loads(text), schema), text


def test_most_is_served_by_each_backend(compile: Compile) -> None:
    served = {
        backend: sum(compile_or_skip_refused(compile, backend, json=schema) is not None for schema in SCHEMAS.values())
        for backend in BACKENDS
    }
    assert served["auto"] == len(SCHEMAS)
    assert served["xgrammar"] >= 25 and served["guidance"] >= 40
    assert served["outlines"] >= 12
    assert served["lm-format-enforcer"] == 0  # its JSON is not exact


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_would_be_left_out_is_refused(compile: Compile, backend: str, name: str) -> None:
    with pytest.raises(GrammarError, match="cannot be enforced"):
        compile(json=UNSUPPORTED[name], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regex", REGEXES)
def test_outputs_match_the_regex(compile: Compile, vocabulary: Vocabulary, backend: str, regex: str) -> None:
    compiled = compile_or_skip_refused(compile, backend, regex=regex)
    rng = random.Random(regex)
    for draft in range(OUTPUTS if compiled is not None else 0):
        text = draw(compiled, vocabulary, rng, draft=draft % 3)
        assert re.fullmatch(regex, text), repr(text)


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance"])
@pytest.mark.parametrize("grammar", [*EBNF, *LARK])
def test_outputs_follow_the_grammar(compile: Compile, vocabulary: Vocabulary, backend: str, grammar: str) -> None:
    compiled = compile(grammar=grammar, backend=backend)
    pattern = (EBNF | LARK)[grammar]
    for draft in range(OUTPUTS):
        text = draw(compiled, vocabulary, random.Random(draft), draft=draft)
        if pattern is not None:
            assert re.fullmatch(pattern, text)
        else:
            assert text.count("(") == text.count(")")


@pytest.mark.parametrize("backend", BACKENDS)
def test_choices(compile: Compile, vocabulary: Vocabulary, backend: str) -> None:
    choice = ["yes", "yes please", 'no "way"', "a.b*", "ünï\\code", "line\nbreak"]
    if backend == "lm-format-enforcer":  # it writes whole characters only
        with pytest.raises(GrammarError, match="cannot generate"):
            compile(choice=choice, backend=backend)
        choice.remove("ünï\\code")
    compiled = compile(choice=choice, backend=backend)
    assert {draw(compiled, vocabulary, random.Random(i)) for i in range(60)} <= set(choice)


def test_a_json_object_is_an_object(compile: Compile, vocabulary: Vocabulary) -> None:
    for backend in ("xgrammar", "guidance"):
        text = draw(compile(json_object=True, backend=backend), vocabulary, random.Random(3))
        assert isinstance(json.loads(text), dict)


def test_structural_tags(compile: Compile, vocabulary: Vocabulary) -> None:
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 22]}}, "end": "</f>"}
    wanted = {"type": "structural_tag", "format": tag | {"type": "tag"}}
    text = draw(compile(structural_tag=wanted), vocabulary, random.Random(1))
    assert text in ("<f>1</f>", "<f>22</f>")


def test_a_tag_begins_with_its_trigger(compile: Compile, vocabulary: Vocabulary) -> None:
    matcher = compile(structural_tag={"type": "structural_tag", "format": TRIGGERED}).matcher()
    assert vocabulary.end_id in allowed_tokens(matcher, vocabulary)  # free text
    for char in ("a", "<", "f", ">"):
        assert matcher.accept(vocabulary.tokens.index(char.encode()))
    assert {vocabulary.tokens[i][:1] for i in allowed_tokens(matcher, vocabulary)} == {b"1"}


def test_the_output_ends_only_where_the_grammar_allows(compile: Compile, vocabulary: Vocabulary) -> None:
    for backend in BACKENDS:
        matcher = compile(regex="ab+", backend=backend).matcher()
        a, b = (vocabulary.tokens.index(c) for c in (b"a", b"b"))
        assert vocabulary.end_id not in allowed_tokens(matcher, vocabulary)
        assert matcher.accept(a) and not matcher.accept(a)
        assert vocabulary.end_id not in allowed_tokens(matcher, vocabulary)
        assert matcher.accept(b)
        assert set(allowed_tokens(matcher, vocabulary)) >= {vocabulary.end_id, b}
        matcher.rollback(1)
        assert vocabulary.end_id not in allowed_tokens(matcher, vocabulary)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"json": {"type": "strnig"}}, "strnig"),
        ({"json": {"type": "string", "pattern": "("}}, "cannot be enforced"),
        ({"regex": "(a"}, "paren|unclosed"),
        ({"regex": "(?=a)b"}, "look"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "nonsense"}, "cannot be enforced"),
        ({"structural_tag": {"type": "structural_tag"}}, "cannot be enforced"),
        ({"json": {"$ref": "#/$defs/none"}}, "cannot be enforced"),
        ({"json": {"type": "object"}, "backend": "outlines"}, "outlines: an object without properties"),
    ],
)
def test_errors_name_the_cause(compile: Compile, wanted: dict[str, object], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        compile(**wanted)


def test_masks_of_lm_format_enforcer_are_made_once_for_all_sequences(
    compile: Compile, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = pytest.importorskip("lmformatenforcer")
    compiled = compile(regex="[a-z]+", backend="lm-format-enforcer")
    made: list[object] = []
    monkeypatch.setattr(lib.TokenEnforcer, "_collect_allowed_tokens", lambda *args: made.append(args))
    first, second = compiled.matcher(), compiled.matcher()
    assert len(allowed_tokens(first, vocabulary)) >= 26
    assert allowed_tokens(second, vocabulary) == allowed_tokens(first, vocabulary)
    assert not made
