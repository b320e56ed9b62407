"""The benchmark of tiers measures what it says: prompts from the device, and from the tier alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.bench.workloads import TINY_SHAPE

TOKEN_BYTES = 2 * 2 * 2 * 16 * 2  # keys and values of two layers with two heads, in bfloat16
SIZES = ["--users", "4", "--tokens", "200", "--output", "1", "--rounds", "1", "--tier-gib", "0.01"]


def kv_tiers(folder: Path, task: str, device_tokens: int) -> subprocess.CompletedProcess[str]:
    """On a folder that holds a shape alone."""
    shape = TINY_SHAPE | {"vocab_size": 32_000}
    (folder / "config.json").write_text(json.dumps(shape))
    model = ["--model", str(folder), "--load-format", "dummy"]
    device = ["--device-gib", str(device_tokens * TOKEN_BYTES / 2**30), "--out", str(folder / "found.json")]
    command = [sys.executable, "-m", "benchmarks.kv_tiers", task, *model, *device, *SIZES]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("task", ["prompts", "chats", "churn"])
def test_a_shape_without_a_tokenizer(tmp_path: Path, task: str) -> None:
    done = kv_tiers(tmp_path, task, device_tokens=1000)
    assert done.returncode == 0, done.stderr
    results: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "found.json").read_text())["results"]
    (off,), (on,) = results["off"], results["on"]
    assert off["tier"] is None and on["tier"]["saved_blocks"] > 4 * 12
    if task == "prompts":
        assert off["cached"] == [0] * 4, "some were left on the device"
        assert on["cached"] == [192] * 4
        assert on["tier"]["loaded_blocks"] == 4 * 12, "some came from the device"


def test_a_device_that_keeps_all_prompts(tmp_path: Path) -> None:
    done = kv_tiers(tmp_path, "prompts", device_tokens=5000)
    assert done.returncode and "the device is too large for other prompts" in done.stderr
