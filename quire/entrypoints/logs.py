"""Log lines for people: to standard error, only if the program has not set up logging itself."""

from quire.config.logs import set_up_logging

__all__ = ["set_up_logging"]
