"""Engines on one folder that are killed while they write, again and again; every answer must be right.

    python -m tests.kv_offload.kill_soak [--seconds 600] [--seed 0]

A child serves random traffic (soak.py) through a device cache that is too small, and the folder. It is killed at a
random time, and another one is started on what is left; two at a time now and then. The last one ends by itself. Then
nothing may be left of any writer, every file must be whole, and the folder within its size.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM
from quire.distributed.kv_offload.block_file import BlockFiles
from quire.distributed.kv_offload.folder_upkeep import block_files, remove_abandoned
from tests.kv_offload.soak import MAX_LEN, conversations, expected, serve
from tests.tiny_models import save_tiny

NUM_BLOCKS = 24
DISK_BYTES = 4 << 20  # so little that files are evicted all the time


def child(given: dict[str, Any]) -> None:
    """Says "serving" once it does, and how many answers were right at the end."""
    draw = random.Random(given["seed"])
    folder = {"shared_storage_path": given["folder"], "disk_bytes_to_use": DISK_BYTES}
    connector = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": folder}
    with LLM(
        given["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_LEN,
        num_gpu_blocks_override=NUM_BLOCKS,
        kv_transfer_config=connector,
        async_scheduling=draw.random() < 0.8,
        max_num_batched_tokens=draw.choice([24, 64, 512]),
    ) as llm:
        print("serving", flush=True)
        answered = serve(llm, given["prompts"], given["texts"], draw, time.monotonic() + given["seconds"])
        core = llm.llm_engine.client.core
        while core.has_unfinished():
            core.step()
        assert core.state()["blocks_free"] == core.num_blocks, "blocks are held"
        stats = core.scheduler.transfers.connectors[0].stats()
        print(json.dumps({"answered": answered, "hits": stats.hits, "errors": stats.errors}), flush=True)


def start(given: dict[str, Any]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.kv_offload.kill_soak", "--child"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(given) + "\n")
    process.stdin.flush()
    return process


def check_folder(folder: Path) -> int:
    """The number of blocks."""
    remove_abandoned(folder)
    left = [path.name for path in folder.iterdir() if len(path.name) != 2 and path.name != "evict.lock"]
    assert not left, f"left over: {left}"
    files, total = BlockFiles(), 0
    for _, size, path in block_files(folder):
        total += size
        with open(path, "rb") as file:
            content = bytearray(file.read())
        files.read(Path(path), bytes.fromhex(Path(path).name), memoryview(content)[: size - 4096])
    assert total <= 1.2 * DISK_BYTES, f"the folder has {total} bytes"
    return sum(1 for _ in block_files(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.child:
        child(json.loads(sys.stdin.readline()))
        return
    draw, end, kills = random.Random(parsed.seed), time.monotonic() + parsed.seconds, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary) / "kv", Path(temporary) / "model"
        save_tiny("llama", model)
        prompts = conversations(draw, 60)
        given = {"folder": str(folder), "model": str(model), "prompts": prompts, "seconds": 3600.0}
        given["texts"] = expected(str(model), prompts)
        while kills == 0 or time.monotonic() < end:
            count = 1 if draw.random() < 0.7 else 2
            processes = [start(given | {"seed": draw.randrange(1 << 30)}) for _ in range(count)]
            for process in processes:
                assert process.stdout is not None and process.stdout.readline() == "serving\n", "it did not start"
            time.sleep(draw.uniform(0.1, 4.0))
            for process in processes:
                assert process.poll() is None, "a child has ended: see its error above"
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
        last = start(given | {"seed": 1, "seconds": min(3.0, parsed.seconds)})
        out, _ = last.communicate()
        assert last.returncode == 0, "the last child failed"
        result = json.loads(out.splitlines()[-1])
        assert result["answered"] and not any(result["errors"].values()), result
        assert result["hits"] or result["answered"] < 50, result
        print(f"{kills} killed, {check_folder(folder)} blocks at the end, the last: {result}")


if __name__ == "__main__":
    main()
