"""Triton's cache, from which it runs compiled code whoever wrote it."""

import logging
from pathlib import Path

from quire.config.environment import TRITON_CACHE_DIR, TRITON_HOME
from quire.platforms.private_files import process_folder, require_private_tree

logger = logging.getLogger("quire")


def secure_cache() -> None:
    """Point Triton, here and in processes started from here, to a folder of this process where others can write to its
    cache."""
    folder = TRITON_CACHE_DIR.get() or Path(TRITON_HOME.get() or Path("~").expanduser(), ".triton", "cache")
    try:
        require_private_tree(Path(folder))
    except OSError as error:
        TRITON_CACHE_DIR.set(str(process_folder()))
        logger.warning("Triton's cache is not used, every start compiles kernels anew: %s", error)
