"""Triton's cache folder, which must be private: Triton runs the compiled code it finds there."""

import logging
import os
from pathlib import Path

from quire.platforms.private_files import process_folder, require_private_tree

logger = logging.getLogger("quire")

SETTING = "TRITON_CACHE_DIR"


def secure_cache() -> None:
    """If others can write to Triton's cache, use a temporary folder instead, here and in child processes."""
    folder = os.environ.get(SETTING) or os.path.join(
        os.environ.get("TRITON_HOME") or Path("~").expanduser(), ".triton", "cache"
    )
    try:
        require_private_tree(Path(folder))
    except OSError as error:
        os.environ[SETTING] = str(process_folder())
        logger.warning("Triton's cache is not used, every start compiles kernels anew: %s", error)
