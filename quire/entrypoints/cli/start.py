"""Starts an engine from a command's flags."""

import argparse
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from quire.config.flags import engine_kwargs

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.chat_renderer import ChatRenderer


def start_engine(args: argparse.Namespace, leave_out: Collection[str] = ()) -> "LLMEngine":
    """Imports torch and the engine here, after the flags have been checked."""
    from quire.config import EngineConfig
    from quire.config.logs import set_up_logging
    from quire.config.vllm.unpack import logging_options

    engine_args = engine_kwargs(args, leave_out)
    set_up_logging(*logging_options(engine_args))
    config = EngineConfig.from_kwargs(**engine_args)
    began = time.perf_counter()
    from quire.engine.llm_engine import LLMEngine

    return LLMEngine(config, import_seconds=time.perf_counter() - began)


def chat_renderer(engine: "LLMEngine") -> "ChatRenderer":
    from quire.entrypoints.chat_renderer import ChatRenderer

    if engine.tokenizer is None:
        raise ValueError("a chat needs a tokenizer: drop --skip-tokenizer-init")
    return ChatRenderer(engine.tokenizer, engine.config.model.chat_template)


def refuse_engine_flags(args: argparse.Namespace, allowed: Collection[str] = ()) -> None:
    """With --url the engine is the server's: engine flags would silently have no effect."""
    given = sorted(engine_kwargs(args, allowed))
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{names} with --url: the server has an engine of its own; give such flags to quire serve")
