import json
import time

import pytest

from quire.tokenizer.chat_template import render_chat

FORBIDDEN = {
    "is unsafe": "{{ messages.append(1) }}",
    "__class__": "{{ ''.__class__.__mro__ }}",
    "may not set": "{{ namespace(__class__=1) }}",
    "no loader": "{% include 'secret' %}",
    "no system role, please": "{{ raise_exception('no system role, please') }}",
    "line 2: Expected an expression": "\n{% if %}",
    "No filter named 'nofilter'": "{{ 1 | nofilter }}",
    "'str object' has no attribute": "{{ messages[0].content.foo.bar }}",
    "TypeError": "{{ 'a' + 1 }}",
    "at most 1000000": "x" * 1_000_001,
}


@pytest.mark.parametrize("message", FORBIDDEN)
def test_mistakes_of_a_template_are_value_errors(message):
    with pytest.raises(ValueError, match=message):
        render_chat([{"role": "user", "content": "hi"}], FORBIDDEN[message])


def test_strftime_now():
    text = render_chat([{"role": "user", "content": "x"}], "{{ strftime_now('%Y-%m-%d') }}")
    assert time.strptime(text, "%Y-%m-%d").tm_year >= 2025


def test_json_is_not_escaped_for_html():
    assert (
        json.loads(render_chat([{"role": "u", "content": "<&'é"}], "{{ messages | tojson }}"))[0]["content"] == "<&'é"
    )
