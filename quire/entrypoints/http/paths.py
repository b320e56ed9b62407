"""Paths of requests."""

from starlette.types import Scope


def path_of(scope: Scope) -> str:
    """The path as routes spell it, without --root-path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path
