"""Log format of all Quire processes."""

import logging


def set_up_logging(level: int = logging.INFO) -> None:
    """Log to standard error, unless the program has configured logging itself."""
    logger = logging.getLogger("quire")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quire: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
