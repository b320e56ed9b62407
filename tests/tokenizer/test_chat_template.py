import json
import time

import pytest

from quire.tokenizer.chat_template import compile_template, render_chat

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
# Corners of the language: macros, joins, a break, the training tag, nested sets and loop variables.
CORNERS = """
{% macro show(m, mark='-') %}{{ mark ~ m.role ~ ":" ~ loop_count ~ m.content | upper }}{% endmacro %}
{% set loop_count = messages | length %}
{% for m in messages if m.role != 'tool' %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% generation %}
    {{ show(m, mark='+' * loop.index) }}{{ loop.revindex }}{{ loop.last }}{{ loop.length }}
  {% endgeneration %}
{% endfor %}
{% set text %}a{{ 1 + 2 }}{{ none }}{{ [1, 'é<>', {'k': true}] }}{{ ('x',) + (1,) }}{% endset %}
{{ text }}{{ {'a': [1, 'é<>&']} | tojson }}{{ messages | map(attribute='role') | unique | join(', ') }}
{{ '%s-%d' % ('a', 3) }}{{ 'b{:>4}'.format(1) }}{{ missing }}{{ 7 // 2 }}{{ 2 ** 5 }}
{% for k, v in dict(a=1, b=2) | dictsort %}{{ k }}{{ v }}{{ loop.cycle('x', 'y') }}{% else %}none{% endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter in "Köln" <b>',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = {"id": "abc123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "  Hi there\n"}],
    "system": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Grüße 你好 🙂 <|im_end|>"}],
    "many turns": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\na1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": " a2 "},
        {"role": "user", "content": "q3"},
    ],
    "tool call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "abc123"},
    ],
}
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "corners": CORNERS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def reference():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(reference, name, conversation, tools):
    messages = CONVERSATIONS[conversation]
    for generation, extra in ((True, {}), (False, {"enable_thinking": False}), (True, {"enable_thinking": False})):
        expected = reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=TEMPLATES[name],
            add_generation_prompt=generation,
            tokenize=False,
            **extra,
        )
        given = render_chat(
            messages,
            TEMPLATES[name],
            tools=tools,
            add_generation_prompt=generation,
            template_kwargs=extra,
            special_tokens=SPECIAL,
        )
        assert given == expected


@pytest.mark.parametrize("text", ["Once upon", "Once upon a time  ", "  x", "a\n\nb \n"])
@pytest.mark.parametrize("name", ["smollm2", "llama3", "mistral"])
def test_a_final_message_is_continued_as_by_transformers(reference, name, text):
    messages = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": text}]
    expected = reference.apply_chat_template(
        messages, chat_template=TEMPLATES[name], continue_final_message=True, tokenize=False
    )
    options = {"add_generation_prompt": False, "continue_final_message": True, "special_tokens": SPECIAL}
    assert render_chat(messages, TEMPLATES[name], **options) == expected
    assert messages[1]["content"] == text


def test_continuing_needs_something_to_continue():
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="use one"):
        render_chat(message, SMOLLM2, continue_final_message=True)
    with pytest.raises(ValueError, match="does not show"):
        render_chat(message, "nothing", continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(ValueError, match="with text to go on with"):
        render_chat([{"role": "x"}], "nothing", continue_final_message=True, add_generation_prompt=False)


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


def test_inputs_are_plain_values():
    with pytest.raises(ValueError, match="plain JSON values; got object"):
        render_chat([{"role": "user", "content": object()}], SMOLLM2)
    with pytest.raises(ValueError, match="is empty"):
        render_chat([], SMOLLM2)
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        render_chat([{"role": "user", "content": nested}], SMOLLM2)


def test_long_conversations_have_the_budget_they_need():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(2001)]
    for template in (SMOLLM2, LLAMA3, QWEN, MISTRAL):
        assert len(render_chat(messages, template, special_tokens=SPECIAL)) > 2_000_000
    big = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(render_chat(big, LLAMA3, tools=TOOLS, special_tokens=SPECIAL)) > 9_000_000


def test_a_template_is_compiled_once():
    assert compile_template(QWEN) is compile_template(QWEN)


def test_strftime_now():
    text = render_chat([{"role": "user", "content": "x"}], "{{ strftime_now('%Y-%m-%d') }}")
    assert time.strptime(text, "%Y-%m-%d").tm_year >= 2025


def test_json_is_not_escaped_for_html():
    assert (
        json.loads(render_chat([{"role": "u", "content": "<&'é"}], "{{ messages | tojson }}"))[0]["content"] == "<&'é"
    )
