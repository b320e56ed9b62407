"""Tells checkpoints apart by what their files hold, without reading all of it."""

import hashlib
from pathlib import Path

from quire.checkpoint.resolve import Checkpoint

SAMPLES, SAMPLE_BYTES = 64, 4096  # hashed of each file
HUB_BLOBS = "blobs"  # the folder in which the hub's cache names large files by their hash


def file_identity(file: Path) -> tuple[str, int, int, str]:
    """With samples of its bytes: container images may give files equal paths and times, and finetunes equal sizes."""
    real = file.resolve()
    size, digest = real.stat().st_size, hashlib.sha256()
    with real.open("rb") as stream:
        for i in range(SAMPLES + 1):
            stream.seek(max(0, size - SAMPLE_BYTES) * i // SAMPLES)
            digest.update(stream.read(SAMPLE_BYTES))
    return str(real), size, real.stat().st_mtime_ns, digest.hexdigest()


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """The same for copies on other machines, if they kept the files' times: samples alone would not tell of a finetune
    that changed few tensors."""
    facts: list[object] = [checkpoint.format]
    if not checkpoint.files:
        facts.append(checkpoint.name)
    for file in checkpoint.files:
        real = file.resolve()
        facts.append(real.name if real.parent.name == HUB_BLOBS else (file.name, *file_identity(file)[1:]))
    config = checkpoint.path / "config.json"
    if config.is_file():
        facts.append(config.read_bytes())
    return hashlib.sha256(repr(facts).encode()).hexdigest()
