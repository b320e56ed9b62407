"""Chromium, and servers that run from a built wheel. Without Playwright or Chromium the tests in it are skipped."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.page.static_files import FOLDER

ROOT = FOLDER.parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Nothing but this machine can be reached, or even looked up.
ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]

Starter = Callable[..., Any]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "unpacked")
    return folder / "unpacked"


@contextmanager
def running(command: list[str], wheel: Path, found: Callable[[str], str | None]) -> Iterator[tuple[str, Any]]:
    """A server's URL and process, from when it says where it listens."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(wheel)}
    process = subprocess.Popen(
        command, cwd=wheel, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            url = found(line)
            if url is not None:
                break
        else:
            raise AssertionError("the server did not start:\n" + "".join(said))
        yield url, process
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def parrot(wheel: Path) -> Iterator[str]:
    with start_parrot(wheel) as url:
        yield url


@contextmanager
def start_parrot(wheel: Path, *flags: str) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("parrot.py")), *flags]
    with running(command, wheel, lambda line: line.strip() if line.startswith("http") else None) as (url, _):
        yield url


@contextmanager
def start_quire(wheel: Path, *flags: str) -> Iterator[tuple[str, Any]]:
    """A real server on the embedded model."""
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        "--port",
        "0",
        "--no-access-log",
        "--shutdown-timeout",
        "1",
        *flags,
    ]

    def found(line: str) -> str | None:
        return line.split(" at ")[1].strip() if "serving " in line and " at http" in line else None

    with running(command, wheel, found) as (url, process):
        yield url, process


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-page")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: make test-page")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Complaints(list[str]):
    """What a page must not do: break, warn, or call elsewhere."""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with open_page(browser) as page:
        yield page


@contextmanager
def open_page(browser: Any, **options: Any) -> Iterator[Any]:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    page.set_default_timeout(40_000)
    page.complaints = Complaints()
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "request", lambda r: r.url.startswith(("http://127.0.0.1", "data:", "blob:")) or page.complaints.append(r.url)
    )
    page.on("console", lambda m: m.type == "error" and _counts(m.text) and page.complaints.append(m.text))
    page.add_init_script("window.executed = []; window.alert = (text) => window.executed.push(text)")
    yield page
    assert page.evaluate("window.executed") == []
    assert page.complaints == []
    context.close()


def _counts(text: str) -> bool:
    """Failed calls are logged by the browser, and are what some tests are about."""
    return "Failed to load resource" not in text
