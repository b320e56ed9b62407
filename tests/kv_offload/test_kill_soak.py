"""A short slice of `make kv-soak`."""

import subprocess
import sys


def test_killed_engines_leave_nothing_wrong():
    done = subprocess.run([sys.executable, "-m", "tests.kv_offload.kill_soak", "--seconds", "1"], check=False)
    assert done.returncode == 0
