import pytest

from quire.tokenizer.chat_template import compile_template, render_chat
from tests.tokenizer.chat_templates import CONVERSATIONS, QWEN, SMOLLM2, SPECIAL, TEMPLATES, TOOLS


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


def test_a_template_is_compiled_once():
    assert compile_template(QWEN) is compile_template(QWEN)
