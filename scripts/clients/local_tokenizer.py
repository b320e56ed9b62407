"""The served model's tokenizer as a folder, for clients that count tokens themselves and would ask a hub for it.

Run by itself, with Quire's Python: local_tokenizer.py FOLDER.
"""

import os
import subprocess
import sys
from pathlib import Path


def with_quire(script: Path, *arguments: str) -> str:
    """What a script prints that the Python of Quire runs, which has the model and can read it."""
    command = [os.environ["QUIRE_PYTHON"], str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": os.environ["QUIRE_ROOT"]}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def tokenizer_folder(folder: Path) -> str:
    if not (folder / "tokenizer.json").exists():
        with_quire(Path(__file__), str(folder))
    return str(folder)


if __name__ == "__main__":
    import transformers

    from quire.checkpoint.resolve import resolve_model

    path = resolve_model(None).path
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(sys.argv[1])
