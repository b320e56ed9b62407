"""Triton's cache, from which it runs compiled code whoever wrote it."""

import logging
import os
from pathlib import Path

from quire.platforms.private_files import process_folder, require_private_tree

logger = logging.getLogger("quire")

SETTING = "TRITON_CACHE_DIR"


def secure_cache() -> None:
    """Point Triton, here and in processes started from here, to a folder of this process where others can write to its
    cache."""
    folder = os.environ.get(SETTING) or os.path.join(
        os.environ.get("TRITON_HOME") or Path("~").expanduser(), ".triton", "cache"
    )
    try:
        require_private_tree(Path(folder))
    except OSError as error:
        os.environ[SETTING] = str(process_folder())
        logger.warning("Triton's cache is not used, every start compiles kernels anew: %s", error)
