"""Finding a model's files and reading configuration and weights out of them.

`resolve_model` says which files a model is made of, `config` what it is, and `tensors` gives its weights.
"""

from quire.checkpoint.resolve import Checkpoint, resolve_model

__all__ = ["Checkpoint", "resolve_model"]
