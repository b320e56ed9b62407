"""The tests of a GPU in plain pytest processes side by side: its machine may have no pytest-xdist.

    python -m benchmarks.gpu.side_by_side 8 build/tests tests/gpu [options of pytest]

Process i writes build/tests-i.log and build/tests-i.xml. Each takes tests that no other has, by making a file for each
(`Share`, which pytest loads as a plugin): one that is slow, or crashes, keeps no other from its tests. A process that
crashed, or whose device is lost, is started again and goes on with what is left. A SIGINT ends all of them.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

TOGETHER = 4  # neighbours, which often need the same compiled kernels
RESTARTS = 20
SECONDS_TO_END = 12  # after SIGINT
PLUGIN = "benchmarks.gpu.side_by_side"
CLAIMED = "claimed by"
GOOD = ("passed", "skipped")
AGAIN = (
    pytest.ExitCode.INTERRUPTED,
    -signal.SIGSEGV,
    -signal.SIGABRT,
    -signal.SIGBUS,
)  # the device is lost, or a crash


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, help="a folder with a file for each test that a process has taken")


def pytest_configure(config: pytest.Config) -> None:
    if (folder := config.getoption("--claims")) is not None:
        config.pluginmanager.register(Share(folder))


class Share:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: set[str] = set()  # of the phases of the current test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        (self.folder / "collected").write_text(str(len(session.items)))
        if session.testsfailed:
            return None  # while collecting: pytest says what
        taken = self._taken(session.items)
        current = next(taken, None)
        while current is not None:
            following = next(taken, None)  # pytest keeps the fixtures that both need
            self._run(current, following)
            if "failed" in self.outcomes and _device_is_lost():
                session.shouldstop = "the device is lost"
            if why := session.shouldfail or session.shouldstop:
                if following is not None:
                    self._claim(following).unlink()
                raise session.Interrupted(why)
            current = following
        return True

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self.outcomes.clear()
        self._claim(item).write_text(f"{item.nodeid}\nbegun")
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        outcome = next(name for name in ("failed", *reversed(GOOD)) if name in self.outcomes)
        self._claim(item).write_text(f"{item.nodeid}\n{outcome}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report.outcome)

    def _taken(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Groups of neighbours that nobody has begun; then what is left of those that others have."""
        for start in range(0, len(items), TOGETHER):
            if self._take(items[start]):
                yield items[start]
                yield from filter(self._take, items[start + 1 : start + TOGETHER])
        yield from filter(self._take, items)

    def _take(self, item: pytest.Item) -> bool:
        try:
            with self._claim(item).open("x") as file:
                file.write(f"{item.nodeid}\n{CLAIMED} {os.getpid()}")
        except FileExistsError:
            return False
        return True

    def _claim(self, item: pytest.Item) -> Path:
        return self.folder / hashlib.sha1(item.nodeid.encode()).hexdigest()


def _device_is_lost() -> bool:
    """By an error that all later calls of this process would raise again."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


class Processes:
    def __init__(self, prefix: str, claims: Path, given: list[str]) -> None:
        self._prefix, self._claims, self._given = prefix, claims, given
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ending = threading.Event()

    def run(self, number: int) -> int:
        """One after the other, until there is nothing left for one: the last one's exit status."""
        code = 0
        with open(f"{self._prefix}-{number}.log", "wb") as log:
            for start in range(1 + RESTARTS):
                name = f"{number}-{start}" if start else f"{number}"
                process = subprocess.Popen(self._command(name), stdout=log, stderr=subprocess.STDOUT)
                self._running.add(process)
                code = process.wait()
                self._release(process.pid)
                self._running.discard(process)
                if code not in AGAIN or self._ending.is_set():
                    break
        return code

    def _release(self, pid: int) -> None:
        """What a process that has ended would have begun next."""
        for path in self._claims.iterdir():
            with suppress(FileNotFoundError):  # another process gave it back meanwhile
                if path.read_text().endswith(f"\n{CLAIMED} {pid}"):
                    path.unlink()

    def _command(self, name: str) -> list[str]:
        plugins = ["-p", PLUGIN, "-p", "no:cacheprovider", "--claims", str(self._claims)]
        report = ["-v", "--junitxml", f"{self._prefix}-{name}.xml"]
        return [sys.executable, "-m", "pytest", *plugins, "-m", "gpu", *report, *self._given]

    def end(self, signal_number: int, frame: FrameType | None) -> None:
        """They have got the signal, too, and write what they have, unless they hang."""
        self._ending.set()
        timer = threading.Timer(SECONDS_TO_END, lambda: [process.kill() for process in list(self._running)])
        timer.daemon = True
        timer.start()


def summary(claims: Path) -> tuple[list[str], bool]:
    """Lines, and whether all tests are good."""
    collected = claims / "collected"
    total = int(collected.read_text()) if collected.exists() else 0
    tests = [path.read_text().partition("\n") for path in claims.iterdir() if path != collected]
    counts = dict.fromkeys((*GOOD, "failed", "not ended"), 0)
    bad = []
    for name, _, state in tests:
        outcome = state if state in (*GOOD, "failed") else "not ended"
        counts[outcome] += 1
        bad += [] if outcome in GOOD else [f"{outcome}: {name}"]
    counts["not begun"] = total - len(tests)
    line = f"{total} tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return [*sorted(bad), line], total > 0 and total == sum(counts[name] for name in GOOD)


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    count, prefix, given = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # Once, not in every process at the same time.
    subprocess.run([sys.executable, "-c", "from quire.kernels import native; native.library()"], check=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        processes = Processes(prefix, Path(folder), given)
        signal.signal(signal.SIGINT, processes.end)
        codes = list(pool.map(processes.run, range(count)))
        lines, good = summary(Path(folder))
    print("\n".join(lines))
    for number, code in enumerate(codes):
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            print(f"process {number} ended with {code}: {prefix}-{number}.log")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
