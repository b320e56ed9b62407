"""Logging to standard error, unless the program has configured logging itself."""

from quire.config.logs import set_up_logging

__all__ = ["set_up_logging"]
