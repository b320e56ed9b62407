"""Log lines for people: to standard error, only if the program has not set up logging itself."""

import logging


def set_up_logging(level: int = logging.INFO) -> None:
    logger = logging.getLogger("quire")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quire: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
