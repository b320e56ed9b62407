"""Whether a module's parts may be called in its place: not if a subclass or a user would notice."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

__all__ = ["any_global_hook", "has_hooks", "has_own_hooks", "is_plain"]


def is_plain(module: object, kind: type[nn.Module], *methods: str) -> bool:
    """Whether it is a `kind` of which nothing replaces `forward` and these methods."""
    return isinstance(module, kind) and all(
        getattr(getattr(module, name), "__func__", None) is getattr(kind, name) for name in ("forward", *methods)
    )


def has_own_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_hooks(module: nn.Module | None) -> bool:
    """On it or on what is inside."""
    return module is not None and (has_own_hooks(module) or any(map(has_hooks, module._modules.values())))
