"""Random regular expressions and grammars through whole engines: 64 at a time, hot, each its own.

What a random model writes without end is cut; then it must be a beginning that the grammar allows.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from quire import LLM, SamplingParams
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output.model import open_engine
from tests.structured_output.random_forms import Grammar, is_small, matches_regex, random_grammar, random_regex

MAX_TOKENS = 160
END_BIAS = 12.0  # the end is one of 300 tokens
RNG = random.Random(20)
REGEXES = [random_regex(RNG) for _ in range(200)]
GRAMMARS = [random_grammar(RNG) for _ in range(50)]


@dataclass
class Form:
    spec: StructuredOutputsParams
    fits: Callable[[str], bool]


def regex_forms(backend: str) -> list[Form]:
    return [
        Form(
            StructuredOutputsParams(regex=regex, backend=backend), lambda text, regex=regex: matches_regex(regex, text)
        )
        for regex in REGEXES
    ]


def grammar_forms(backend: str, form: Callable[[Grammar], str]) -> list[Form]:
    return [Form(StructuredOutputsParams(grammar=form(one), backend=backend), one.matches) for one in GRAMMARS]


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with open_engine(tiny) as one:
        yield one


def params(forms: list[Form], end_id: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=2.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
            logit_bias={end_id: END_BIAS},
            structured_outputs=form.spec,
        )
        for seed, form in enumerate(forms)
    ]


def prompts(count: int) -> list[dict[str, list[int]]]:
    """Some blocks of each are in the cache, left by others."""
    return [{"prompt_token_ids": [*range(40, 75), i % 7]} for i in range(count)]


def check(llm: LLM, vocabulary: Vocabulary, forms: list[Form], least_whole: float) -> None:
    registry = BackendRegistry(lambda: vocabulary)
    outputs = llm.generate(prompts(len(forms)), params(forms, vocabulary.end_id), use_tqdm=False)
    whole = 0
    for form, output in zip(forms, outputs, strict=True):
        [completion] = output.outputs
        assert output.error is None, (form.spec, output.error)
        if completion.finish_reason == "stop":
            whole += 1
            assert form.fits(completion.text), (form.spec.text, completion.text)
        else:
            matcher = registry.compile(form.spec).matcher()
            assert all(map(matcher.accept, completion.token_ids)), (form.spec.text, completion.text)
    assert whole >= least_whole * len(forms)


def test_all_regexes(llm: LLM, vocabulary: Vocabulary) -> None:
    check(llm, vocabulary, regex_forms("auto"), least_whole=0.7)


@pytest.mark.parametrize("backend", ["guidance", "outlines", "lm-format-enforcer"])
def test_regexes_of_other_backends(llm: LLM, vocabulary: Vocabulary, backend: str) -> None:
    registry = BackendRegistry(lambda: vocabulary)
    served = []
    for form in [form for form in regex_forms(backend) if backend != "outlines" or is_small(form.spec.text)][:64]:
        try:
            registry.compile(form.spec)
        except GrammarError:
            assert backend == "lm-format-enforcer"  # characters that are no tokens
        else:
            served.append(form)
    assert len(served) >= 16
    check(llm, vocabulary, served, least_whole=0.6)


@pytest.mark.parametrize("backend", ["auto", "guidance"])
def test_all_grammars(llm: LLM, vocabulary: Vocabulary, backend: str) -> None:
    forms = grammar_forms(backend, Grammar.ebnf) + grammar_forms(backend, Grammar.lark)
    check(llm, vocabulary, forms, least_whole=0.6)


def test_the_reference_matcher_can_reject() -> None:
    for grammar in GRAMMARS:
        assert not grammar.matches("") and not grammar.matches("~")
    sums = Grammar({"root": [["t"], ["t", '"+"', "root"]], "t": [["[0-9]"], ['"("', "root", '")"']]})
    assert sums.matches("1+(2+3)+4") and not sums.matches("1+(2+3") and not sums.matches("12")


def test_the_depth_of_asynchrony_changes_nothing(tiny: str, vocabulary: Vocabulary) -> None:
    forms = regex_forms("auto")[:40] + grammar_forms("guidance", Grammar.ebnf)[:24]
    free = SamplingParams(temperature=2.0, seed=5, max_tokens=40)
    wanted = [one for each in params(forms, vocabulary.end_id) for one in (each, free)]
    found = []
    for options in ({"async_scheduling": False}, {"async_depth": 1}, {"async_depth": 2}):
        with open_engine(tiny, max_num_seqs=48, **options) as llm:
            outputs = llm.generate(prompts(len(wanted)), wanted, use_tqdm=False)
            found.append([(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs])
    assert found[0] == found[1] == found[2]
