"""How log lines look, in every process of ours."""

import logging


def set_up_logging(level: int = logging.INFO) -> None:
    """To standard error, only if the program has not set up logging itself."""
    logger = logging.getLogger("quire")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quire: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
