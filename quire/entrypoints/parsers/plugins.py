"""Loads the files and modules in which users register parsers of their own."""

import importlib
import importlib.util
from pathlib import Path


def load_plugin(path: str, flag: str) -> None:
    """`path` is a .py file or the name of a module; `flag` is where it was given."""
    try:
        if not path.endswith(".py"):
            importlib.import_module(path)
            return
        spec = importlib.util.spec_from_file_location(f"quire_plugin_{Path(path).stem}", path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except (ImportError, OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{flag} {path} cannot be imported: {error}") from error
