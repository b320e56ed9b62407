"""Chat templates mutated from real ones. An input is a template."""

import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.child import SECRET, ChildTarget
from tests.fuzz.mutate import mutated_text

SECONDS = 10.0  # for two renderings
MEGABYTES = 1024
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4"},
    {"role": "user", "content": [{"type": "text", "text": "Thank you " * 20}]},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SNIPPETS = (
    "{% for i in range(100000) %}x{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ a }}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{{ 'x' * 10**9 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ [0] * 10**8 }}",
    "{{ 'x'.center(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ ('a' * 1000).replace('a', 'b' * 100000) }}",
    "{{ (('a,' * 100000).split(',')) | join('b' * 10000) }}",
    "{{ range(10**7) | list | length }}",
    "{{ range(10**6) | map('string') | join | length }}",
    "{{ messages | tojson(indent=10**8) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now('%9999999d') }}",
    "{{ strftime_now('%Y' * 100000) }}",
    "{% include '/etc/passwd' %}",
    "{% extends messages %}",
    "{% import 'os' as os %}",
    "{{ 'a' | attr('__class__') }}",
    "{{ dict(a=1) | xmlattr }}",
    "{{ messages | pprint }}",
    "{{ 'aaaa' | wordwrap(0) }}",
    "{{ messages | batch(10**8) | list }}",
    "{{ messages | groupby('role') | list }}",
    "{{ messages | sum(attribute='x') }}",
    "{{ caller() }}",
    "{{ loop.index }}",
    "{% set messages = messages * 1000 %}",
    "{% break %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% filter upper %}x{% endfilter %}",
    "{% call(x) m(1) %}{% endcall %}",
    "{{ (" * 100,
    "{% if 1 %}" * 300,
    "{{ [" + "[" * 500,
    "{{ -" + "-" * 2000 + "1 }}",
    "{{ 1 if 1 else " * 200,
    "{{ a" + ".a" * 2000 + " }}",
    "{{ 1" + " + 1" * 3000 + " }}",
    "{{ 'x'" + " ~ 'x'" * 2000 + " }}",
    "| tojson",
    "| length",
    "| list",
    "[::-1]",
    "[:99999999999999999999]",
    "(",
    "}}",
    "{%-",
    "-%}",
    "{#",
    "99999999999999999999999",
)


def seeds() -> list[str]:
    from quire.checkpoint import resolve_model
    from quire.tokenizer import load_tokenizer
    from tests.tokenizer.chat_templates import TEMPLATES
    from tests.tokenizer.test_template_meter import DOUBLING

    texts = [*TEMPLATES.values(), DOUBLING]
    own = load_tokenizer(resolve_model(None)).chat_template
    return texts + ([own] if isinstance(own, str) else [])


class TemplateTarget(ChildTarget):
    name = "template"
    function, seconds, megabytes = "tests.fuzz.templates:render", SECONDS, MEGABYTES

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        templates = seeds()
        while True:
            text = rng.choice(templates)
            if rng.random() < 0.2:
                text = rng.choice(SNIPPETS) + rng.choice([*SNIPPETS, ""])
            yield mutated_text(rng, text, SNIPPETS).encode("utf-8", "replace")


def render(data: bytes) -> str:
    """Runs in the child. Must return text or raise a ValueError."""
    from quire.tokenizer.chat_template import render_chat

    template = data.decode("utf-8", "replace")
    for continues in (False, True):
        options: Any = {"add_generation_prompt": not continues, "continue_final_message": continues}
        try:
            text = render_chat(MESSAGES, template, tools=TOOLS, special_tokens={"bos_token": "<s>"}, **options)
        except ValueError as error:
            text = str(error)
        if SECRET in text or "root:x:0" in text:
            return "the template read a secret"
    return ""
