"""Small helpers that vLLM's users import from it beside its engines."""

import enum
import itertools
import logging
import random
import socket
import uuid
from pathlib import Path

from quire.config.environment import process_environment


class UsageContext(enum.Enum):
    """Accepted and not used: nothing is reported to anyone."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Counter:
    def __init__(self, start: int = 0) -> None:
        self._next = itertools.count(start)

    def __next__(self) -> int:
        return next(self._next)


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def random_uuid() -> str:
    return uuid.uuid4().hex


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def load_chat_template(chat_template: Path | str | None, *, is_literal: bool = False) -> str | None:
    """The text of a template file, or the text itself."""
    from quire.entrypoints.chat_renderer import read_template

    return str(chat_template) if is_literal else read_template(str(chat_template)) if chat_template else None


def get_open_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


def set_random_seed(seed: int | None) -> None:
    """Of the libraries. Requests have seeds of their own."""
    if seed is not None:
        import numpy
        import torch

        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)


def variable(name: str) -> str | None:
    """`envs.VLLM_...`: the environment variable's text."""
    if not name.startswith("VLLM_"):
        raise AttributeError(f"there is no environment variable {name!r} of vLLM's")
    return process_environment().get(name)
