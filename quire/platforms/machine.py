"""Which machine this is, and which commit of the source runs: for bug reports and results of measurements."""

import platform
import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """The commit of a source checkout, with `-dirty` if files differ from it; None for an installed package."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    # Installed inside someone else's repository, git would answer with that one's commit.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
