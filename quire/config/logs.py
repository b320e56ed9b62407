"""Log format of all Quire processes."""

import json
import logging
import logging.config
import sys
from pathlib import Path
from typing import Any

from quire.config.environment import (
    VLLM_CONFIGURE_LOGGING,
    VLLM_LOGGING_CONFIG_PATH,
    VLLM_LOGGING_LEVEL,
    VLLM_LOGGING_PREFIX,
    VLLM_LOGGING_STREAM,
    without_effect,
)

logger = logging.getLogger("quire")
_said: set[str] = set()


def set_up_logging(level: int | str | None = None, config_file: str | None = None, name: str = "") -> None:
    """Log to standard error, unless a file configures logging (`logging.config.dictConfig` as JSON) or the program has
    done so itself. `name` is this process's, where there are several of a kind."""
    config_file = config_file or VLLM_LOGGING_CONFIG_PATH.get()
    if config_file is not None:
        logging.config.dictConfig(_read_config(Path(config_file)))
        return
    if logger.handlers or logging.getLogger().handlers or not VLLM_CONFIGURE_LOGGING.get():
        return
    to_output = VLLM_LOGGING_STREAM.get() == "ext://sys.stdout"
    handler = logging.StreamHandler(sys.stdout if to_output else sys.stderr)
    prefix = VLLM_LOGGING_PREFIX.get().replace("%", "%%")
    handler.setFormatter(logging.Formatter(f"{prefix}quire: {name and name + ': '}%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level or VLLM_LOGGING_LEVEL.get())


def _read_config(file: Path) -> dict[str, Any]:
    """A file made for vLLM configures our loggers like its own, with plain formatters in place of its classes."""
    try:
        config = json.loads(file.expanduser().read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error} (--log-config-file)") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, as logging.config.dictConfig takes it (--log-config-file)")
    config.setdefault("disable_existing_loggers", False)
    loggers: dict[str, Any] = config.setdefault("loggers", {})
    for name in [name for name in loggers if name.split(".")[0] == "vllm"]:
        loggers.setdefault("quire" + name.removeprefix("vllm"), loggers[name])
    for formatter in config.get("formatters", {}).values():
        if str(formatter.get("class", "")).startswith("vllm."):
            del formatter["class"]
    return config


def say_once(message: str, level: int = logging.INFO) -> None:
    """A note about the configuration, however many engines this process makes of it."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def check_environment(strict: bool = False) -> None:
    """Name vLLM's environment variables that are set but have no effect here; a ValueError if that is not allowed."""
    names = without_effect()
    if names and strict:
        raise ValueError(
            f"environment variables without effect here: {', '.join(names)} (--fail-on-environ-validation)"
        )
    if names:
        say_once(f"environment variables without effect here: {', '.join(names)}", logging.WARNING)
