"""Each format, whole and split at every position."""

import sys
import types
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.parsers.base import Chain, ParsedDelta, TextParser
from quire.entrypoints.parsers.reasoning import FORMATS, TagFormat, reasoning_format
from quire.entrypoints.parsers.reasoning.formats import OTHER_FORMATS
from quire.entrypoints.parsers.reasoning.registry import known_formats
from quire.entrypoints.parsers.reasoning.tags import MAX_BLANK, SuffixedFormat
from tests.entrypoints.vllm_parser_names import REASONING_PARSERS
from tests.properties import examples


def parse(parser: TextParser, pieces: Iterable[str]) -> tuple[str, str]:
    found = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(one.reasoning for one in found), "".join(one.content for one in found)


def check(format: TagFormat, text: str, reasoning: str, content: str, open: bool | None = None) -> None:
    expected = (reasoning, content)
    assert parse(format.parser(open), [text]) == expected
    assert parse(format.parser(open), text) == expected
    for cut in range(1, len(text)):
        assert parse(format.parser(open), [text[:cut], text[cut:]]) == expected, text[:cut]


THINK = "Hmm, 2 < 3.\nYes</b>"
ANSWER = "\n\nIt is <think> 3 </think>."


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_a_model_writes(name: str) -> None:
    format = FORMATS[name]
    text = f"{format.start}{THINK}{format.end}{ANSWER}"
    check(format, text, THINK, ANSWER, format.is_open("<|user|>2 or 3?<|assistant|>"))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_template_wrote_the_start_tag(name: str) -> None:
    format = FORMATS[name]
    prompt = f"<|assistant|>{format.start}\n"
    assert format.is_open(prompt) is True
    check(format, f"{THINK}{format.end}{ANSWER}", THINK, ANSWER, format.is_open(prompt))
    check(format, f"{format.start}{THINK}{format.end}{ANSWER}", THINK, ANSWER, format.is_open(prompt))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_template_switched_thinking_off(name: str) -> None:
    format = FORMATS[name]
    prompt = f"<|assistant|>{format.start}\n\n{format.end}\n\n"
    assert format.is_open(prompt) is False
    assert parse(format.parser(False), ["3, as ", "I said"]) == ("", "3, as I said")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_without_tags(name: str) -> None:
    format = FORMATS[name]
    text = " 3, of course"
    expected = (text, "") if format.implied else ("", text)
    check(format, text, *expected, open=format.is_open("<|assistant|>"))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_end_that_never_comes(name: str) -> None:
    format = FORMATS[name]
    unfinished = format.end[:-1]
    check(format, f"{format.start}{THINK}{unfinished}", f"{THINK}{unfinished}", "", format.is_open("<|assistant|>"))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_empty_reasoning_and_empty_text(name: str) -> None:
    format = FORMATS[name]
    check(format, f"{format.start}{format.end}{ANSWER}", "", ANSWER)
    check(format, f"{format.start}{format.end}", "", "")
    check(format, format.start, "", "")
    check(format, "", "", "")


def test_white_space_before_the_start_tag_is_dropped() -> None:
    format = FORMATS["qwen3"]
    check(format, "\n <think>a</think>b", "a", "b")
    check(format, " " * MAX_BLANK + "<think>a</think>b", "a", "b")
    check(format, " " * (MAX_BLANK + 1) + "<think>a</think>b", "", " " * (MAX_BLANK + 1) + "<think>a</think>b")
    check(format, "  <thin", "", "  <thin")
    check(format, "  <thin", "  <thin", "", open=True)


def test_reasoning_comes_first_or_not_at_all() -> None:
    check(FORMATS["glm45"], "Use <think>a</think> for that.", "", "Use <think>a</think> for that.")


def test_the_first_end_tag_ends_it() -> None:
    check(FORMATS["qwen3"], "<think>a</think>b</think>c", "a", "b</think>c")


def test_spellings_of_granite() -> None:
    check(FORMATS["granite"], "Here's my thought process: a Here is my response: b", " a ", " b")
    check(FORMATS["granite"], "Here is my thought process: Here's a Here's my response:b", " Here's a ", "b")
    check(FORMATS["granite"], "Here is my answer: b", "", "Here is my answer: b")


def test_hunyuan_content_between_tags() -> None:
    text = "<think>\nHm\n</think>\n<answer>\nYes\n</answer>"
    check(FORMATS["hunyuan_a13b"], text, "Hm", "Yes")
    check(FORMATS["hunyuan_a13b"], "<think>\n\n</think>\n<answer>\nYes\n</answer>", "", "Yes")


def test_ernie_content_between_tags() -> None:
    check(FORMATS["ernie45"], "Hm</think>\n<response>\nYes\n</response>", "Hm", "\nYes", open=True)


def test_effort_has_tags_of_its_own() -> None:
    check(FORMATS["k2_horizon"], "<ifm|think_fast>Hm</ifm|think_fast>Yes", "Hm", "Yes")


def test_a_checkpoints_suffix() -> None:
    format = SuffixedFormat().for_tokens(["<pad>", "<think:6124c78e>"])
    check(format, "<think:6124c78e>Hm</think:6124c78e>Yes", "Hm", "Yes")
    assert SuffixedFormat().for_tokens(["<pad>"]).start == "<think>"


CHANNELS = {
    "openai_gptoss": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    "<|return|>",
    "cohere_command3": "<|START_THINKING|>Hm<|END_THINKING|>\n<|START_RESPONSE|>Yes<|END_RESPONSE|>",
    "inkling": "<|message_model|><|content_thinking|>Hm<|end_message|><|message_model|><|content_text|>Yes"
    "<|end_message|>",
    "kimi_k3": "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>Yes<|close|>response<|sep|>",
    "muse_glimmer": " to=self<|message|>Hm<|eom|><|start|>assistant to=user<|message|>Yes<|eot|>",
}


@pytest.mark.parametrize("name", CHANNELS)
def test_channels(name: str) -> None:
    format, text = OTHER_FORMATS[name], CHANNELS[name]
    open = format.is_open("<|user|>2 or 3?<|assistant|>")
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert parse(format.parser(open), pieces) == ("Hm", "Yes")
    assert parse(format.parser(open), ["3, of course"])[name == "kimi_k3"] == ""
    assert format.is_open(f"<|assistant|>{format.start}") is True
    assert format.is_open(f"<|assistant|>{format.start}{format.end}") is False
    assert format.is_open(f"{format.start}Hm", continues=True) is True


def test_a_prompt_that_begins_a_channel() -> None:
    cohere = OTHER_FORMATS["cohere_command3"]
    open = cohere.is_open("<|CHATBOT_TOKEN|><|START_THINKING|>")
    assert parse(cohere.parser(open), ["Hm<|END_THINKING|><|START_RESPONSE|>Yes"]) == ("Hm", "Yes")


def test_a_call_that_no_tool_was_offered_for() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parse(OTHER_FORMATS["openai_gptoss"].parser(None), text) == ("", "{}")


def test_reasoning_kept_in_the_content() -> None:
    kept = OTHER_FORMATS["minimax_m2_append_think"]
    for pieces in (["Hm</think>Yes"], "Hm</think>Yes"):
        assert parse(kept.parser(kept.is_open("]~b]ai\n<think>\n")), pieces) == ("", "<think>Hm</think>Yes")


def test_vllms_names_are_known() -> None:
    assert set(REASONING_PARSERS) - set(known_formats()) == {"hf"}
    assert all(reasoning_format(name).start for name in known_formats())
    with pytest.raises(ValueError, match="--reasoning-parser hf is not available yet"):
        reasoning_format("hf")


def test_a_tool_call_ends_reasoning() -> None:
    calls = "<|tool_calls_section_begin|><|tool_call_begin|>"
    check(FORMATS["kimi_k2"], f"Let me look.{calls}", "Let me look.", calls, open=True)
    call = "<tool_call>\n<function=now>"
    check(FORMATS["qwen3"], f"<think>A <tool_call> may help.{call}", "A <tool_call> may help.", call)


def test_continuing_a_response() -> None:
    format = FORMATS["deepseek_r1"]
    assert format.is_open("<think>I was", continues=True) is True
    assert format.is_open("<think>I was</think>So", continues=True) is False
    assert format.is_open("So", continues=True) is False


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(FORMATS)), st.sampled_from([True, False, None]), st.data())
def test_pieces_make_no_difference(name: str, open: bool | None, data: st.DataObject) -> None:
    format = FORMATS[name]
    parts = [*format.markers, *(m[: len(m) // 2] for m in format.markers), *(m[1:] for m in format.markers)]
    text = "".join(data.draw(st.lists(st.sampled_from([*parts, " ", "\n", "a", "<", "é"]), max_size=12)))
    whole = parse(format.parser(open), [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(format.parser(open), pieces) == parse(format.parser(open), text) == whole


def test_little_is_held_back() -> None:
    """Text that cannot be part of a tag is emitted at once; so each character is read a bounded number of times."""
    parser = FORMATS["deepseek_r1"].parser(True)
    sent = 0
    for i in range(1, 1001):
        sent += len(parser.feed("a<"[i % 2]).reasoning)
        assert i - sent < len("</think>")


class Shout:
    """A fake tool parser that records each text it is fed."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def feed(self, text: str, token_ids: object = ()) -> ParsedDelta:
        self.got.append(text)
        return ParsedDelta(text.upper())

    def finish(self) -> ParsedDelta:
        return ParsedDelta("!")


def test_the_second_parser_sees_the_content_alone() -> None:
    text = "<think>ab</think>cd"
    for pieces in ([text], list(text)):
        second = Shout()
        assert parse(Chain(FORMATS["qwen3"].parser(None), second), pieces) == ("ab", "CD!")
        assert "".join(second.got) == "cd"
    second = Shout()
    assert parse(Chain(FORMATS["qwen3"].parser(None), second), ["<thi"]) == ("", "<THI!")


def test_custom_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_formats")
    module.LOUD = TagFormat(("HMM",), ("SO",))  # type: ignore[attr-defined]
    module.WRONG = "HMM"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_formats", module)
    found = reasoning_format("my_formats:LOUD")
    assert parse(found.parser(None), ["HMM why SO because"]) == (" why ", " because")
    with pytest.raises(ValueError, match="is not a reasoning format"):
        reasoning_format("my_formats:WRONG")
    with pytest.raises(ValueError, match="cannot be imported"):
        reasoning_format("my_formats:MISSING")
    with pytest.raises(ValueError, match="is not known; use one of cohere_command3"):
        reasoning_format("deepseek")


@pytest.mark.parametrize("tags", [{"ends": ()}, {"starts": ("",)}, {"ends": ("</a>", "x</a>y")}])
def test_ambiguous_tags_are_refused(tags: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="tag"):
        TagFormat(**tags)  # type: ignore[arg-type]
