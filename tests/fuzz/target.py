"""Fuzz targets: each generates inputs and checks them."""

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

CORPUS = Path(__file__).parent / "corpus"  # inputs that once failed, in a folder per target

TARGETS = {
    "http": "tests.fuzz.http_bodies:HttpTarget",
    "pooling": "tests.fuzz.http_bodies:PoolingTarget",
    "socket": "tests.fuzz.raw_sockets:SocketTarget",
    "template": "tests.fuzz.templates:TemplateTarget",
    "grammar": "tests.fuzz.grammars:GrammarTarget",
    "safetensors": "tests.fuzz.checkpoints:SafetensorsTarget",
    "gguf": "tests.fuzz.checkpoints:GgufTarget",
    "config": "tests.fuzz.checkpoints:ConfigTarget",
    "tokenizer": "tests.fuzz.checkpoints:TokenizerTarget",
    "kernels": "tests.fuzz.kernels:KernelsTarget",
}


class Target(Protocol):
    """Entered once for many inputs. Exiting may raise too, for leaks caused by all inputs together."""

    name: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        """Endless inputs, mutated from valid ones."""
        ...

    def check(self, data: bytes) -> None:
        """AssertionError if `data` breaks a property."""
        ...


def load_target(name: str) -> Target:
    """Raises ImportError or AttributeError if its module or class does not exist."""
    module, _, cls = TARGETS[name].partition(":")
    target: Target = getattr(importlib.import_module(module), cls)()
    return target


def corpus_files(name: str) -> list[Path]:
    folder = CORPUS / name
    return sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
