"""Triton's cache folder, which must be private: Triton runs the compiled code it finds there."""

import logging
from pathlib import Path

from quire.config.environment import TRITON_CACHE_DIR, TRITON_HOME
from quire.platforms.private_files import process_folder, require_private_tree

logger = logging.getLogger("quire")


def secure_cache() -> None:
    """If others can write to Triton's cache, use a temporary folder instead, here and in child processes."""
    folder = TRITON_CACHE_DIR.get() or Path(TRITON_HOME.get() or Path("~").expanduser(), ".triton", "cache")
    try:
        require_private_tree(Path(folder))
    except OSError as error:
        TRITON_CACHE_DIR.set(str(process_folder()))
        logger.warning("Triton's cache is not used, every start compiles kernels anew: %s", error)
