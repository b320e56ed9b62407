"""Take the pictures of docs/page again, with the embedded model: `make page-pictures`.

python -m tests.entrypoints.page.pictures [NAME...]
"""

import io
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.entrypoints.page.conftest import ARGUMENTS, CHROMIUM, ROOT, open_page, start_quire
from tests.entrypoints.page.test_browser import DONE, ask, engine_of, until

FOLDER = ROOT / "docs" / "page"
CODE = "Write a Python function that merges two sorted lists."
PRESS = "Who invented the printing press, and why did it matter?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "year", "city"],
    "additionalProperties": False,
}
THEMES = ("the printing press", "a paper mill", "the history of ink", "bookbinding", "a quiet library", "the alphabet")


class Pictures:
    """Each method takes one, or some that belong together, on a server of its own or the common one."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url

    @contextmanager
    def page(self, url: str = "", **options: Any) -> Iterator[Any]:
        with open_page(self.browser, **{"viewport": {"width": 1280, "height": 800}} | options) as page:
            page.goto(url or self.url)
            yield page

    def take(self, page: Any, name: str) -> None:
        file = FOLDER / f"{name}.png"
        with_palette(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).save(file, optimize=True)
        print(file, flush=True)

    def chat(self) -> None:
        with self.page(color_scheme="dark") as page:
            greedy(page)
            ask(page, CODE)
            self.take(page, "chat")

    def phone(self) -> None:
        with self.page(viewport={"width": 390, "height": 844}, has_touch=True, device_scale_factor=2) as page:
            with panel(page):
                greedy(page)
            ask(page, CODE)
            self.take(page, "phone")

    def zoom(self) -> None:
        """A window of 1280 by 900 pixels at 200 %."""
        with self.page(viewport={"width": 640, "height": 450}, device_scale_factor=2) as page:
            with panel(page):
                greedy(page)
            ask(page, "Name three uses of paper.")
            self.take(page, "zoom")

    def stop(self) -> None:
        with self.page() as page:
            greedy(page)
            ask(page, PRESS, wait=False)
            until(page, "document.querySelector('q-message.assistant > .text').textContent.length > 300")
            page.click('button[aria-label="Stop"]')
            page.wait_for_selector(DONE)
            self.take(page, "stop")

    def edit(self) -> None:
        with self.page() as page:
            greedy(page)
            ask(page, "What is a quire of paper?")
            page.hover("q-message.user")
            page.click("q-message.user button:has-text('Edit')")
            page.fill("q-message.user textarea", "What is a quire of paper? One sentence.")
            page.click("text=Send as a new branch")
            page.wait_for_selector(DONE)
            page.hover("q-message.user")
            page.wait_for_timeout(300)  # its buttons fade in
            self.take(page, "edit")

    def schema(self) -> None:
        with self.page() as page:
            greedy(page)
            page.fill("#s-schema", json.dumps(SCHEMA, indent=1))
            ask(page, "Who invented the printing press, when, and in which city?")
            page.evaluate("document.querySelector('#s-schema').scrollTop = 0")
            self.take(page, "schema")

    def tokens(self) -> None:
        with self.page() as page:
            page.click("#tab-complete")
            page.fill("#prompt", "The printing press was invented in")
            page.click("text=Token boundaries of the prompt")
            page.fill("#raw-p-temperature", "0.9")
            page.fill("#raw-p-seed", "11")
            unfold(page, "Output")
            page.fill("#raw-p-logprobs", "5")
            unfold(page, "Length")
            page.fill("#raw-p-max_tokens", "48")
            page.click("q-complete .button.main")
            until(page, "document.querySelectorAll('.results .token').length >= 40")
            page.wait_for_timeout(1500)
            page.locator(".results .token").nth(9).hover()
            page.wait_for_selector(".card:not([hidden])")
            self.take(page, "tokens")

    def long(self) -> None:
        with self.page() as page:
            unfold(page, "Length")
            page.fill("#p-max_tokens", "4000")
            unfold(page, "Stop")
            page.check("#p-ignore_eos")
            page.set_default_timeout(300_000)
            frames = watch_frames(page)
            ask(page, "Write a long history of the book, in many chapters.", wait=False)
            page.wait_for_selector(DONE)
            print("frames of 4,000 tokens:", frames(), flush=True)
            page.wait_for_timeout(500)
            self.take(page, "long")

    def keyboard(self) -> None:
        with self.page() as page:
            page.wait_for_selector("q-chat .welcome")
            for _ in range(60):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.matches('.welcome li:nth-child(2) button')"):
                    break
            self.take(page, "keyboard")

    def key(self) -> None:
        with start_quire(ROOT, "--api-key", "right", "--max-model-len", "1024") as (url, _), self.page(url) as page:
            page.wait_for_selector("dialog[open]")
            page.fill("#key", "a wrong one")
            page.press("#key", "Enter")
            page.wait_for_selector("dialog .error:has-text('not known')")
            self.take(page, "key")

    def killed(self) -> None:
        with start_quire(ROOT, "--max-model-len", "2048") as (url, process), self.page(url) as page:
            unfold(page, "Stop")
            page.check("#p-ignore_eos")
            ask(page, PRESS, wait=False)
            until(page, "document.querySelector('q-message.assistant > .text').textContent.length > 300")
            os.kill(engine_of(process.pid), signal.SIGKILL)
            page.wait_for_selector("q-message.assistant .note.error")
            page.wait_for_selector(".banner:has-text('Your chats are kept')")
            self.take(page, "killed")

    def engine(self) -> None:
        flags = ("--num-gpu-blocks-override", "1400", "--max-model-len", "2048")
        tall = {"width": 1280, "height": 1000}
        with (
            start_quire(ROOT, *flags) as (url, _),
            self.page(url + "/#engine", viewport=tall) as page,
            streams(url, 64),
        ):
            page.wait_for_selector("q-view .state:has-text('Live')")
            until(page, "Number(document.querySelector('.figures dd').textContent) > 40")
            page.wait_for_timeout(40_000)  # the plots' span, without the start
            self.take(page, "engine")
            with page.expect_download() as saved:
                page.click("text=Save the last minute")
            (FOLDER / "sample.json.gz").write_bytes(Path(saved.value.path()).read_bytes())


def with_palette(picture: Image.Image) -> Image.Image:
    """Half of the size: with the colours that most pixels have, and the extremes of the others."""
    counts = sorted(picture.getcolors(1 << 24), reverse=True)[:128]
    extremes = picture.quantize(128, Image.Quantize.MAXCOVERAGE).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(part for _, color in counts for part in color), *extremes])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def greedy(page: Any) -> None:
    page.fill("#p-temperature", "0")


def unfold(page: Any, title: str) -> None:
    """A group of parameters."""
    for group in page.locator(f"details.group:has(summary:has-text('{title}'))").all():
        group.evaluate("(each) => { each.open = true }")


@contextmanager
def panel(page: Any) -> Iterator[None]:
    """The settings, where they lie over the chat."""
    page.click("button[aria-label='Settings']")
    yield
    page.keyboard.press("Escape")


def watch_frames(page: Any) -> Callable[[], str]:
    page.evaluate("""() => {
        window.frames_ = []; let before = performance.now();
        const note = (now) => { window.frames_.push(now - before); before = now; requestAnimationFrame(note) };
        requestAnimationFrame(note) }""")

    def told() -> str:
        frames = sorted(page.evaluate("window.frames_"))
        median, late = frames[len(frames) // 2], frames[int(0.99 * len(frames))]
        return f"{len(frames)}, median {median:.0f} ms, 99 % {late:.0f} ms, longest {frames[-1]:.0f} ms"

    return told


@contextmanager
def streams(url: str, count: int) -> Iterator[None]:
    """That many clients, each with one request after another: some long prompts that are alike, short ones that are
    not."""
    ended = threading.Event()

    def one(number: int) -> None:
        chosen = random.Random(number)
        while not ended.is_set():
            theme, kind = chosen.choice(THEMES), chosen.random()
            shared = "You are a careful librarian who answers at length. " * 24 if kind < 0.4 else ""
            own = " ".join(chosen.choices(THEMES, k=chosen.randrange(60))) if kind > 0.7 else ""
            prompt = f"{shared}{chosen.randrange(10**6)} {own}, a story about {theme}: once "
            tokens = chosen.randrange(24, 320)
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
            try:
                with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
                    for _ in response.iter_lines():
                        if ended.is_set():
                            return
            except httpx.HTTPError:
                return

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def main(names: list[str]) -> None:
    every = [name for name in vars(Pictures) if not name.startswith("_") and name not in ("page", "take")]
    unknown = set(names) - set(every)
    if unknown:
        sys.exit(f"there is no picture {', '.join(sorted(unknown))}; there are: {', '.join(every)}")
    FOLDER.mkdir(exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())  # not one, as for tests
    with sync_playwright() as driver, start_quire(ROOT) as (url, _):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for name in names or every:
            getattr(Pictures(browser, url), name)()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
