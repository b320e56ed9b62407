import pytest

from quire.tokenizer.chat_template import render_chat
from quire.tokenizer.template_meter import (
    BASE_CHARS,
    BASE_WORK,
    MAX_SECONDS,
    Meter,
    TemplateLimitError,
    input_weight_of,
)
from tests.tokenizer.chat_templates import LLAMA3, MISTRAL, QWEN, SMOLLM2, SPECIAL, TOOLS

DOUBLING = "{{% set ns = namespace(x=['ab']) %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ ns.x }}}}"
ENDLESS = {
    "empty loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for i in range(99999) %}{% for j in range(99999) if false %}x{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "two calls each": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "two loops each": "{% for x in [1,2] recursive %}{% if loop.depth < 90 %}{{ loop([1,2]) }}{% endif %}{% endfor %}",
    "+": DOUBLING.format("{% set ns.x = ns.x + ns.x %}"),
    "~": DOUBLING.format("{% set ns.x = ns.x ~ ns.x %}"),
    "set block": DOUBLING.format("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "list of lists": DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}"),
    "tuple": DOUBLING.format("{% set ns.x = (ns.x, ns.x) %}"),
    "dict": DOUBLING.format("{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    "dict()": DOUBLING.format("{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "deep": DOUBLING.format("{% for j in range(99) %}{% set ns.x = [ns.x] %}{% endfor %}"),
    "* text": "{{ 'a' * 99999999999 }}",
    "* list": "{{ 99999999999 * [1] }}",
    "power": "{{ 9 ** 999999999 }}",
    "numbers": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "% width": "{{ '%999999999d' % 1 }}",
    "% star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format width": "{{ '{:>999999999}'.format(1) }}",
    "format computed": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "bytes": "{{ 'a'.encode().ljust(9999999999) }}",
    "to_bytes": "{{ (5).to_bytes(9999999999, 'big') }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "map center": "{{ ['a'] | map('center', 9999999999) | list }}",
    "indent": "{{ ('a\n' * 500000) | indent(90000) }}",
    "tojson": "{{ messages | tojson(indent=99999999) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join(range(99999) | map('string')) }}",
    "join filter": "{{ range(99999) | join('b' * 1000000) }}",
    "map list": "{{ ([range(99999)] * 1000) | map('list') | list }}",
    "batch": "{{ [1] | batch(9999999999, 0) | list }}",
    "round": "{{ 3 | round(-999999999) }}",
    "time": "{{ strftime_now('%999999999Y') }}",
    "long expressions": "{% for i in range(99999) %}{% set y = range(99999) | list | sort %}{% endfor %}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_or_exploding_template_ends_with_an_error(kind):
    with pytest.raises(ValueError, match=r"was stopped|nested too deeply"):
        render_chat([{"role": "user", "content": "hi"}], ENDLESS[kind])


def test_long_conversations_have_the_budget_they_need():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(2001)]
    for template in (SMOLLM2, LLAMA3, QWEN, MISTRAL):
        assert len(render_chat(messages, template, special_tokens=SPECIAL)) > 2_000_000
    big = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(render_chat(big, LLAMA3, tools=TOOLS, special_tokens=SPECIAL)) > 9_000_000


def test_work_is_charged_until_the_budget_is_spent():
    meter = Meter(input_weight=0)
    meter.charge(BASE_WORK)
    with pytest.raises(TemplateLimitError, match="far more work"):
        meter.charge(1)


def test_the_budget_grows_with_the_input():
    messages = [{"role": "user", "content": "x" * 1000}]
    assert input_weight_of(messages) == 1 + (1 + len("rolecontent") + 1 + len("user") + 1 + 1000)
    assert Meter(input_weight_of(messages)).max_chars > Meter(0).max_chars == BASE_CHARS


def test_a_rendering_has_a_deadline(monkeypatch):
    now = 0.0
    monkeypatch.setattr("quire.tokenizer.template_meter.time.monotonic", lambda: now)
    meter = Meter(input_weight=0)
    now = MAX_SECONDS
    meter.charge(1)
    now += 1
    with pytest.raises(TemplateLimitError, match="ran for more than 3 seconds"):
        meter.charge(1)


def test_a_part_that_is_shared_weighs_each_time():
    meter, part = Meter(input_weight=0), ["abc"]
    assert meter.weigh(part) == 5 and meter.weigh([part, part]) == 11
