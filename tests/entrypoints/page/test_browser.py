"""The page in a real browser, from a built wheel: `make test-page`."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.page.conftest import open_page, start_parrot, start_quire

DONE = 'q-message.assistant:last-of-type[aria-busy="false"]'
BUSY = 'q-message.assistant:last-of-type[aria-busy="true"]'


def until(page: Any, condition: str) -> None:
    """Playwright's own waiting evaluates texts in the page, which its policy forbids."""
    deadline = time.monotonic() + 40
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def ask(page: Any, text: str, wait: bool = True) -> None:
    before = page.locator("q-message").count()
    page.fill("#ask", text)
    page.press("#ask", "Enter")
    until(page, f"document.querySelectorAll('q-message').length >= {before + 2}")
    if wait:
        page.wait_for_selector(DONE)


def last_answer(page: Any) -> str:
    return text_of(page.locator("q-message.assistant").last.locator("> .text"))


def text_of(element: Any) -> str:
    """Also of what has not been painted yet, which `inner_text` takes for empty."""
    return str(element.text_content()).strip()


def test_first_chat(page: Any, parrot: str) -> None:
    page.goto(parrot)
    ask(page, "Hello there")
    assert last_answer(page) == "You said: Hello there"
    facts = page.locator("q-message.assistant .facts").inner_text()
    assert re.search(r"\d+ tokens · .*first after [\d.]+ m?s", facts)
    page.reload()  # the chat is kept
    page.wait_for_selector("q-message.assistant")
    assert last_answer(page) == "You said: Hello there"


def test_markdown_code_and_mathematics(page: Any, parrot: str) -> None:
    page.goto(parrot)
    text = (
        "# Title\\n\\n- one\\n- **two**\\n\\n```python\\nprint(1)\\n```"
        "\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\nSo $x^2$ and\\n\\n$$\\frac{a}{b}$$"
    )
    ask(page, f"SAY: {text}")
    answer = page.locator("q-message.assistant")
    assert answer.locator("h1").last.inner_text() == "Title" and answer.locator("li strong").inner_text() == "two"
    assert (
        answer.locator("figure.code pre").inner_text() == "print(1)\n"
        or "print(1)" in answer.locator("pre").inner_text()
    )
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    answer.locator("math").first.wait_for()
    assert answer.locator("math").count() == 2 and answer.locator("mfrac").count() == 1
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.locator("figcaption button").click()
    assert page.evaluate("navigator.clipboard.readText()").strip() == "print(1)"


BLOCKS = r"""1. One\n\n2. Two\n3. Three\n\n   more of it\n\n10. Ten\n\nA paragraph\nof two lines\n\n- a\n  - b\n\n- c
> quoted\n\n> again\n\n```python\nx = 1\n\ny = 2\n```\n\nTitle\n---\n\n    indented\n\n    still
| a | b |\n|---|---|\n| 1 | 2 |\n\n$$\nx^2\n\n$$\n\n**bold** and `code` and [a link](https://example.org)
***\n\nThe end.""".replace("\n", r"\n\n")


def test_a_stream_is_shown_as_the_whole_text_is(page: Any, wheel: Path) -> None:
    with start_parrot(wheel, "--step-seconds", "0.04") as url:  # slow enough for every token to be shown
        page.goto(url)
        ask(page, f"SAY: {BLOCKS}")
        page.wait_for_selector("q-message.assistant math")
        html = "document.querySelector('q-message.assistant > .text').innerHTML"
        streamed = page.evaluate(html)
        page.reload()
        page.wait_for_selector("q-message.assistant math")
        assert streamed == page.evaluate(html)


def test_stop_regenerate_edit_and_branches(page: Any, wheel: Path) -> None:
    with start_parrot(wheel, "--step-seconds", "0.02") as url:
        page.goto(url)
        ask(page, "COUNT 3000", wait=False)
        until(page, "document.querySelector('q-message.assistant > .text').innerText.length > 20")
        page.click('button[aria-label="Stop"]')
        page.wait_for_selector(DONE)
        assert "stopped by you" in page.locator("q-message.assistant .note").inner_text()
        page.hover("q-message.user")
        page.click("q-message.user button:has-text('Edit')")
        page.fill("q-message.user textarea", "Another question")
        page.click("text=Send as a new branch")
        page.wait_for_selector(DONE)
        assert last_answer(page) == "You said: Another question"
        page.click("q-message.user button[aria-label='Previous version']")
        assert "COUNT 3000" in text_of(page.locator("q-message.user > .text")) and "Word 0" in last_answer(page)
        page.click("q-message.user button[aria-label='Next version']")
        page.click("q-message.assistant button:has-text('Regenerate')")
        page.wait_for_selector("q-message.assistant .branch:has-text('2 / 2')")
        page.wait_for_selector(DONE)


def test_a_schema_is_checked_as_it_is_typed(page: Any, wheel: Path) -> None:
    with start_quire(wheel, "--max-model-len", "1024") as (url, _):
        page.goto(url)
        page.fill("#s-schema", '{"type": "objekt"}')
        assert "objekt" in page.locator("#s-schema-note").inner_text()
        page.fill("#s-schema", '{"type": "object",\n "properties": }')
        assert "Line 2" in page.locator("#s-schema-note").inner_text()
        schema = {"type": "object", "properties": {"year": {"type": "integer", "maximum": 9999}}, "required": ["year"]}
        page.fill("#s-schema", json.dumps(schema | {"additionalProperties": False}))
        assert "Valid schema" in page.locator("#s-schema-note").inner_text()
        page.fill("#p-temperature", "0")
        ask(page, "When did Columbus sail?")
        assert "follows the schema" in page.locator("q-message.assistant .note").inner_text()
        answer = page.locator("q-message.assistant figure.code pre")
        assert isinstance(json.loads(text_of(answer))["year"], int)
        # The tokens' alternatives, and going on from one of them
        page.fill("#s-schema", "")
        page.click("summary:has-text('Output')")
        page.fill("#p-logprobs", "3")
        page.click("summary:has-text('Length')")
        page.fill("#p-max_tokens", "8")
        ask(page, "Name a colour.")
        page.locator("q-message.assistant").last.locator(".token").nth(2).hover()
        card = page.locator("q-message.assistant").last.locator(".card")
        other = card.locator("button:not(.own)").first
        other.click()
        page.wait_for_selector("q-message.assistant .branch:has-text('2 / 2')")
        page.wait_for_selector(DONE)


def test_tools_are_called_and_answered_by_hand(page: Any, parrot: str) -> None:
    page.goto(parrot)
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    page.fill("#s-tools", json.dumps([{"type": "function", "function": tool}]))
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "<img src=x onerror=alert(1)>"}}</tool_call>'
    ask(page, f"SAY: {call}")
    assert page.locator(".call b").inner_text() == "get_weather"
    assert "onerror" in page.locator(".call pre").inner_text()
    page.fill(".call textarea", "Sunny")
    page.click("text=Send result")
    page.wait_for_selector("q-message.tool")
    page.wait_for_selector(DONE)


def test_raw_completions_show_token_boundaries(page: Any, parrot: str) -> None:
    page.goto(parrot + "/#complete")
    page.fill("#prompt", "One two three")
    page.click("text=Token boundaries of the prompt")
    page.wait_for_selector(".prompt-tokens .token >> nth=2")
    assert page.locator(".prompt-tokens .token").all_inner_texts() == ["One", " two", " three"]
    page.click("q-complete .button.main")
    page.wait_for_selector(".results .token >> nth=3")


INJECTIONS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    "[click](javascript:alert(1))",
    "[click](JaVaScRiPt&#58;alert(1))",
    "![x](javascript:alert(1))",
    "![x](http://evil.example/pixel.png)",
    '<a href="javascript:alert(1)">x</a>',
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "$\\href{javascript:alert(1)}{x}$",
    '$\\includegraphics{http://evil.example/x.png}$ $\\class{" onmouseover="alert(1)}{x}$',
    "```html\\n<script>alert(1)</script>\\n```",
    '```"><script>alert(1)</script>\\nx\\n```',
    '<span class="math" data-tex="\\href{javascript:alert(1)}{x}"></span>',
    "<form action=http://evil.example><button>x</button></form>",
    "<style>body{background:url(http://evil.example)}</style>",
    "[x]: javascript:alert(1)\\n\\n[x]",
    "<details open ontoggle=alert(1)>",
    "{{constructor.constructor('alert(1)')()}}",
    "[x](data:text/html,<script>alert(1)</script>) [y](vbscript:alert(1)) <javascript:alert(1)>",
    "[x](java\\tscript:alert(1)) [y](//evil.example) [z](/page/app.js)",
    "$\\style{background:url(http://evil.example)}{x}$ $\\url{javascript:alert(1)}$ $\\data{x=1}{y}$",
    '| <img src=x onerror=alert(1)> | "><svg onload=alert(1)> |\\n|---|---|\\n| [a](javascript:x) | <b onclick=x> |',
    "<input autofocus onfocus=alert(1)> - [x] <input type=image src=x onerror=alert(1)>",
    "<xmp><p title='</xmp><img src=x onerror=alert(1)>'>",
    ">" * 3000 + " <img src=x onerror=alert(1)>",
]


def test_nothing_in_an_answer_is_executed(page: Any, parrot: str) -> None:
    page.goto(parrot)
    for text in INJECTIONS:
        ask(page, f"SAY: before {text} after")
    for link in page.locator("q-message a").all():
        assert re.match(r"https?:|mailto:", link.get_attribute("href") or "http:")
        link_target = link.get_attribute("rel")
        assert link_target == "noopener noreferrer"
    inside = page.locator("q-message .text")
    for tag in ("script", "img", "iframe", "svg", "form", "style", "object", "details"):
        assert inside.locator(tag).count() == 0, tag
    attributes = "[...document.querySelectorAll('q-message *')].flatMap((e) => [...e.attributes].map((a) => a.name))"
    names = set(page.evaluate(attributes))
    assert not any(name.startswith("on") for name in names)
    for place in page.locator("q-message a").all():
        place.hover(timeout=2000)


def test_nothing_in_names_and_schemas_is_executed(page: Any, wheel: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", '"><script>alert(1)</script>']
    with start_parrot(wheel, "--name", *names) as url:
        page.goto(url)
        assert page.locator("select[aria-label='Model'] option").all_inner_texts() == names
        page.fill("#s-schema", '{"type": "<img src=x onerror=alert(1)>"}')
        assert "onerror" in page.locator("#s-schema-note").inner_text()
        page.fill("#s-tools", '[{"name": "<script>alert(1)</script>"}]')
        assert "needs a name" in page.locator("#s-tools-note").inner_text()
        page.fill("#s-schema", "")
        page.fill("#s-tools", "")
        page.fill("#s-system", "<script>alert(1)</script>")
        ask(page, "<img src=x onerror=alert(1)>")
        assert text_of(page.locator("q-message.user > .text")) == "<img src=x onerror=alert(1)>"
        assert page.locator("q-chat .chats img, q-message img").count() == 0


def test_a_long_answer_stays_smooth(page: Any, wheel: Path) -> None:
    with start_parrot(wheel, "--step-seconds", "0.002") as url:
        page.goto(url)
        page.evaluate("""() => {
            window.frames_ = []; let before = performance.now();
            const note = (now) => { window.frames_.push(now - before); before = now; requestAnimationFrame(note) };
            requestAnimationFrame(note) }""")
        ask(page, "COUNT 4000")
        frames = sorted(page.evaluate("window.frames_"))
        median, late = frames[len(frames) // 2], frames[int(0.99 * len(frames))]
        print(f"frames: {len(frames)}, median {median:.0f} ms, 99 % {late:.0f} ms, longest {frames[-1]:.0f} ms")
        assert re.search(r"\d+ tok/s", page.locator("q-message.assistant .facts").inner_text())
        words = last_answer(page).count("ord")
        assert words >= 3900
        assert shown(page, "#ask") and shown(page, "q-message:last-of-type .facts")
        log = "(() => { const log = document.querySelector('.log'); return log.scrollHeight - log.clientHeight })()"
        assert page.evaluate(log) > 1000  # it is the conversation that scrolls


def shown(page: Any, selector: str) -> bool:
    """Within the window."""
    box = page.locator(selector).bounding_box()
    return bool(box and box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"])


def test_a_wrong_key_is_asked_for_again(page: Any, wheel: Path) -> None:
    with start_parrot(wheel, "--api-key", "right") as url:
        page.goto(url)
        page.wait_for_selector("dialog[open]")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("dialog .error:has-text('not known')")
        page.fill("#key", "right")
        page.press("#key", "Enter")
        page.wait_for_selector("q-chat .welcome")
        ask(page, "Hello")
        assert last_answer(page) == "You said: Hello"
        assert "right" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_server_open_to_the_network_says_so(page: Any, wheel: Path) -> None:
    with start_parrot(wheel, "--host", "0.0.0.0") as url:
        page.goto(url)
        page.wait_for_selector(".banner:has-text('open to the network')")
        page.click("#tab-engine")
        page.wait_for_selector("q-view .state:has-text('Off')")


def engine_of(server: int) -> int:
    """The largest of the server's processes."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return max(map(int, children), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def test_an_engine_that_dies_leaves_the_chat(page: Any, wheel: Path) -> None:
    with start_quire(wheel, "--max-model-len", "2048") as (url, process):
        page.goto(url)
        page.click("summary:has-text('Stop')")
        page.check("#p-ignore_eos")
        ask(page, "Tell me a long story.", wait=False)
        until(page, "document.querySelector('q-message.assistant > .text').innerText.length > 20")
        os.kill(engine_of(process.pid), signal.SIGKILL)
        page.wait_for_selector("q-message.assistant .note.error")
        assert "What had arrived is kept" in page.locator("q-message.assistant .note").inner_text()
        page.wait_for_selector(".banner:has-text('Your chats are kept')")
        kept = json.loads(page.evaluate("localStorage.getItem('quire.chats')"))
        assert any(len(node["content"]) > 20 for node in kept[0]["nodes"].values() if node["role"] == "assistant")


def test_the_live_view_under_64_streams(page: Any, wheel: Path) -> None:
    with start_quire(wheel, "--max-model-len", "512", "--num-gpu-blocks-override", "900") as (url, _):
        page.goto(url + "/#engine")
        page.wait_for_selector("q-view .state:has-text('Live')")
        body = {"prompt": "Once upon a time " * 5, "max_tokens": 64, "ignore_eos": True}
        streams = [
            threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=300))
            for _ in range(64)
        ]
        for stream in streams:
            stream.start()
        until(page, "document.querySelectorAll('.requests tbody tr').length === 64")
        until(page, "Number(document.querySelector('.figures dd').textContent) > 8")
        assert "held by one request" in page.locator(".kinds").inner_text()
        with page.expect_download() as saved:
            page.click("text=Save the last minute")
        file = saved.value.path()
        for stream in streams:
            stream.join()
        page.wait_for_selector(".requests:has-text('No requests')")
        page.set_input_files(
            "#recording", {"name": "a.json.gz", "mimeType": "application/gzip", "buffer": Path(file).read_bytes()}
        )
        page.wait_for_selector("q-view .state:has-text('A recording')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser: Any, parrot: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python")
    source = next(Path(axe.__file__).parent.rglob("axe.min.js")).read_text("utf-8")
    with open_page(browser, color_scheme=scheme, bypass_csp=True) as page:
        page.goto(parrot)
        ask(
            page,
            "SAY: # A title\\n\\nText with `code` and [a link](https://example.org)"
            "\\n\\n```python\\nprint(1) # x\\n```\\n\\n| a |\\n|---|\\n| 1 |",
        )
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        for tab in ("chat", "complete", "engine"):
            page.click(f"#tab-{tab}")
            page.wait_for_timeout(500)
            page.evaluate(source)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
            serious = [
                f"{each['id']}: {each['nodes'][0]['html'][:200]}"
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
            assert not serious, (tab, serious)


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize("width, height", [(390, 844), (640, 450)], ids=["phone", "zoom of 200 %"])
def test_narrow_screens(browser: Any, parrot: str, width: int, height: int) -> None:
    """A window of 1280 pixels at 200 % is one of 640."""
    with open_page(browser, viewport={"width": width, "height": height}, has_touch=width < 400) as page:
        page.goto(parrot)
        ask(
            page,
            "SAY: A fairly long answer that has to wrap, with "
            "`a_rather_long_identifier_that_cannot_be_broken_anywhere_at_all`",
        )
        ask(page, "COUNT 300")
        assert fits(page) and shown(page, "#ask") and shown(page, "q-message:last-of-type .facts")
        assert page.locator("#ask").bounding_box()["width"] > 200
        page.click("button[aria-label='Settings']")
        page.fill("#p-temperature", "0.5")
        assert fits(page)
        page.keyboard.press("Escape")
        page.click("button[aria-label='Chats']")
        page.click("text=New chat >> nth=0")
        page.click("#tab-engine")
        page.wait_for_selector("q-view .figures")
        assert fits(page)


def test_keyboard_only(page: Any, parrot: str) -> None:
    page.goto(parrot)
    page.wait_for_selector("q-chat .welcome")

    def tab_to(selector: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement?.matches(s)", selector):
                focused = "getComputedStyle(document.activeElement).outlineStyle"
                seen = f"{focused} !== 'none' || document.activeElement.id === 'ask'"  # its frame shows it
                assert page.evaluate(seen)
                return
        raise AssertionError(f"{selector} cannot be reached")

    tab_to("#ask")
    page.keyboard.type("By keyboard")
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    tab_to("#p-temperature")
    page.keyboard.type("0.7")
    page.keyboard.press("Home")
    page.evaluate("document.activeElement.blur(); document.body.focus()")
    tab_to("#tab-chat")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("q-complete .raw")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("q-view .figures")
    assert page.evaluate("document.title") == "Quire · Engine"


def test_reduced_motion(browser: Any, parrot: str) -> None:
    with open_page(browser, reduced_motion="reduce") as page:
        page.goto(parrot)
        ask(page, "Hello")
        moving = (
            "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).animationName !== 'none').length"
        )
        assert page.evaluate(moving) == 0
