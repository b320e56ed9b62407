"""Messages as users write them, LLM.chat, and `quire chat` in pipes and terminals."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest

from quire import LLM, SamplingParams
from quire.entrypoints.chat_renderer import content_format, normalize_messages, read_template

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = "{% for m in messages %}{% set c = m.content %}{% if c is string %}{{ c }}{% else %}{% for part in c %}x{% endfor %}{% endif %}{% endfor %}"  # noqa: E501
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "takes_parts", "takes_texts"),
    [(PLAIN, False, True), (PARTS, True, False), (EITHER, True, True), ("{{ messages }}", False, True)],
)
def test_how_a_template_takes_content(template, takes_parts, takes_texts):
    assert content_format(template) == (takes_parts, takes_texts)
    text, parts = normalize_messages(
        [{"role": "user", "content": "t"}, {"role": "user", "content": TWO_PARTS}], template
    )
    assert parts["content"] == (TWO_PARTS if takes_parts else "a\nb")
    assert text["content"] == ("t" if takes_texts else [{"type": "text", "text": "t"}])


def test_a_template_sees_all_fields_of_a_part():
    part = {"type": "text", "text": "a", "target_lang_code": "es"}
    (message,) = normalize_messages([{"role": "user", "content": [part, "b"]}], PARTS)
    assert message["content"] == [part, {"type": "text", "text": "b"}]


def test_tool_calls_pass_through_with_their_arguments_parsed():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    odd = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    asked = {"role": "assistant", "tool_calls": [call, odd]}
    answer = {"role": "tool", "content": "ok", "tool_call_id": "1"}
    first, second = normalize_messages([asked, answer], PLAIN)
    assert [c["function"]["arguments"] for c in first["tool_calls"]] == [{"x": 1}, "not json"]
    assert first["content"] == ""
    assert second == answer and call["function"]["arguments"] == '{"x": 1}'


WRONG_MESSAGES = {
    r"messages\[0\].tool_calls\[0\] must be an object with": [{"role": "assistant", "tool_calls": ["f()"]}],
    r"messages\[0\].tool_calls\[1\] must be an object with": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"id": "1", "function": {"arguments": "{}"}}]}
    ],
    r"messages\[0\] needs a role": [{"content": "x"}],
    r"messages\[1\] needs content": [{"role": "user", "content": "x"}, {"role": "user"}],
    r"messages\[0\].content must be a string": [{"role": "user", "content": 5}],
    r"messages\[0\] must be an object": ["hello"],
    "must be a list": "hello",
    r"content\[1\] is of type 'image_url'; only text": [
        {"role": "user", "content": [TWO_PARTS[0], {"type": "image_url", "image_url": {"url": "x"}}]}
    ],
    r"content\[0\] needs a text": [{"role": "user", "content": [{"type": "text"}]}],
    "conversation is empty": [],
}


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=256, kv_cache_memory_bytes=1 << 27, dtype="float32", quantization="dequantized") as llm:
        yield llm


@pytest.mark.parametrize("message", WRONG_MESSAGES)
def test_wrong_messages_are_explained(llm, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(WRONG_MESSAGES[message], GREEDY, use_tqdm=False)


def user(text):
    return [{"role": "user", "content": text}]


def test_one_conversation_or_several(llm):
    [one] = llm.chat(user("What is the capital of France?"), GREEDY, use_tqdm=False)
    assert one.outputs[0].text == "The capital of France is Paris."
    assert one.prompt.endswith("capital of France?<|im_end|>\n<|im_start|>assistant\n")
    # The template writes the special tokens itself: <|im_start|> is token 1, and none is added before it.
    assert one.prompt_token_ids[:2] == [1, 9690] and one.prompt_token_ids.count(1) == 3
    several = llm.chat([user("Hi"), user("What is the capital of France?")], GREEDY, use_tqdm=False)
    assert len(several) == 2 and several[1].outputs[0].text == one.outputs[0].text
    assert llm.chat([user("Hi")] * 2, [GREEDY] * 2, use_tqdm=False)[1].outputs[0].text == several[0].outputs[0].text


def test_templates_and_their_options(llm, tmp_path):
    [output] = llm.chat(user("x"), GREEDY, use_tqdm=False, chat_template=PLAIN)
    assert output.prompt == "user:x;"
    file = tmp_path / "t.jinja"
    file.write_text("{{ word }}{{ tools[0].name }}{{ bos_token }}")
    options = {"chat_template": str(file), "chat_template_kwargs": {"word": "W"}, "tools": [{"name": "T"}]}
    assert llm.chat(user("x"), GREEDY, use_tqdm=False, **options)[0].prompt == "WT<|im_start|>"
    with pytest.raises(ValueError, match="neither a file nor a Jinja template"):
        llm.chat(user("x"), chat_template="no-such-file.jinja")


def test_going_on_with_a_message(llm):
    begun = [*user("What is the capital of France?"), {"role": "assistant", "content": "The capital of"}]
    [output] = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt.endswith("assistant\nThe capital of") and output.outputs[0].text.startswith(" France")
    with pytest.raises(ValueError, match="use one"):
        llm.chat(begun, GREEDY, continue_final_message=True)


def test_a_model_without_a_template(llm, monkeypatch):
    monkeypatch.setattr(llm._chat_renderer, "template", None)
    with pytest.raises(ValueError, match=r"no chat template .*--chat-template"):
        llm.chat(user("x"), GREEDY)
    assert llm.chat(user("x"), GREEDY, use_tqdm=False, chat_template=PLAIN)


def test_inline_templates_and_files(tmp_path):
    assert read_template("a\n") == "a\n" and read_template("{{ x }}") == "{{ x }}"


# Exact: the answer to the question that these tests ask is a near tie.
EXACT = ["--dtype", "float32", "--quantization", "dequantized"]
CHAT = ["-m", "quire", "chat", "--max-model-len", "2048", "--kv-cache-memory-bytes", "256M", *EXACT]


def test_chat_in_a_pipe(tmp_path):
    saved = tmp_path / "saved.json"
    script = f"""What is the capital of France?
/set temperature -1
/set max_tokens 8
one \\
two
\"\"\"three
four\"\"\"
/undo
/show
/save {saved}
/nonsense
/quit
never read
"""
    child = subprocess.run(
        [sys.executable, *CHAT, "--temperature", "0", "--system-prompt", "You are helpful."],
        input=script,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 1  # two lines of the script were wrong
    assert child.stdout.splitlines()[0] == "The capital of France is Paris."
    assert "\033" not in child.stdout and ">>>" not in child.stdout
    assert "temperature: 0.0\nmax_tokens: 8\n" in child.stdout and "system: You are helpful." in child.stdout
    errors = [line for line in child.stderr.splitlines() if "error" in line]
    assert errors == [
        "quire: error: temperature is -1.0; it must be between 0 (greedy) and 10000",
        "quire: error: unknown command /nonsense; see /help",
    ]
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "one \ntwo"
    startup = [line for line in child.stderr.splitlines() if "error" not in line]
    assert len(startup) == 4 and "134.5M parameters · float32 · cpu" in startup[1]
    assert re.search(r"ready in [\d.]+ s: import [\d.]+, model load [\d.]+, cache [\d.]+", startup[3])


class Screen:
    """A program in its own terminal."""

    def __init__(self, *argv, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", **environment})
            os.execv(sys.executable, [sys.executable, *argv])
        self.seen = ""
        self.read_to = 0

    def wait_for(self, text, seconds=60):
        """The output up to and including `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.seen[self.read_to :]:
            ready = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"{text!r} did not appear after: {self.seen[self.read_to :]!r}"
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {text!r}: {self.seen!r}") from None
        end = self.seen.index(text, self.read_to) + len(text)
        found, self.read_to = self.seen[self.read_to : end], end
        return found

    def type(self, text):
        os.write(self.fd, text.encode())

    def press_until(self, key, text):
        """Python does not notice a Ctrl-C that falls between showing a prompt and waiting for input."""
        for _ in range(20):
            self.type(key)
            try:
                return self.wait_for(text, seconds=1)
            except AssertionError:
                pass
        return self.wait_for(text, seconds=0)

    def exit_code(self):
        while True:
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("no_color", ["", "1"])
def test_chat_in_a_terminal(no_color, tmp_path):
    screen = Screen(*CHAT, "--temperature", "0", NO_COLOR=no_color)
    screen.wait_for(">>> ")
    screen.type("/set ignore_eos on\n")
    screen.wait_for("ignore_eos is True")
    screen.wait_for(">>> ")
    screen.type("Count to one million.\n")
    screen.wait_for("\n")
    assert len(screen.wait_for(" ")) > 0  # streaming
    screen.type("\x03")
    screen.wait_for("interrupted")
    screen.wait_for(">>> ")
    screen.press_until("\x03", "Ctrl-D or /quit ends")
    screen.wait_for(">>> ")
    screen.type(f"/save {tmp_path}/saved.json\n")
    screen.wait_for("saved to")
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] and messages[1]["content"]
    screen.wait_for(">>> ")
    screen.type("/clear\n/set ignore_eos off\n")
    screen.wait_for("ignore_eos is False")
    screen.wait_for(">>> ")
    screen.type("What is the capital of France?\n")
    screen.wait_for("The capital of France is Paris.")
    screen.wait_for("tok/s")
    screen.wait_for(">>> ")
    screen.type("\x04")
    assert screen.exit_code() == 0
    assert ("\033[2m" in screen.seen) == (not no_color)


def test_wrong_flags_of_chat_are_one_line():
    for flags, message in ((["--temperature", "-1"], "temperature is -1.0"), (["--n", "2"], "n is always 1")):
        child = subprocess.run([sys.executable, "-m", "quire", "chat", *flags], capture_output=True, text=True)
        assert child.returncode == 2 and child.stderr.startswith(f"quire: error: {message}")
        assert child.stderr.count("\n") == 1


def test_generate_takes_messages(tmp_path):
    lines = [
        {"messages": user("What is the capital of France?"), "id": "a"},
        {"messages": [{"role": "user"}]},
        {"prompt": "The capital of Italy is", "max_tokens": 2},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--prompts-file", source, "--json", "--on-error", "skip", "--temperature", "0"]
    child = subprocess.run(
        [sys.executable, "-m", "quire", "generate", *flags, *CHAT[3:]], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 1 and "line 2: messages[0] needs content" in child.stderr
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert [r["text"] for r in results] == ["The capital of France is Paris.", " Rome."]
    assert results[0]["id"] == "a"


def test_generate_shows_progress_on_a_terminal():
    screen, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 100))
    flags = ["--prompt", "The capital of Italy is", "--temperature", "0", "--max-tokens", "2"]
    command = [sys.executable, "-m", "quire", "generate", *flags, *CHAT[3:]]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120)
    os.close(stderr)
    shown = os.read(screen, 65536).decode()
    os.close(screen)
    assert child.stdout == " Rome.\n" and "tok/s" in shown and "Generating: 100%" in shown


def test_a_closed_pipe_is_not_an_error():
    flags = ["--prompt", "a", "--prompt", "b", "--max-tokens", "1", *CHAT[3:]]
    child = subprocess.Popen(
        [sys.executable, "-m", "quire", "generate", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.close()
    assert "Traceback" not in child.stderr.read() and child.wait(120) == 1
