"""Plugins: entry points of the group `quire.general_plugins`, run at start-up.

A plugin is a function without arguments. It is called once in every process that builds a model or serves HTTP,
before the model's class or the dialects are looked up, and typically calls `ModelRegistry.register_model` or
`register_dialect`.
"""

import functools
import logging
from importlib.metadata import EntryPoint, entry_points

from quire.config.environment import QUIRE_PLUGINS, VLLM_PLUGINS

logger = logging.getLogger("quire")

GROUP = "quire.general_plugins"


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """The names of the plugins that ran. A plugin that fails is logged and skipped."""
    ran = [plugin for plugin in chosen_plugins() if _run(plugin)]
    if ran:
        logger.info("plugins: %s", ", ".join(f"{plugin.name} ({plugin.value})" for plugin in ran))
    return tuple(plugin.name for plugin in ran)


def chosen_plugins() -> list[EntryPoint]:
    """Sorted by name, independent of the order of installation."""
    # A package that is on the path twice is listed twice.
    installed = {plugin.name: plugin for plugin in reversed(list(entry_points(group=GROUP)))}
    variable = QUIRE_PLUGINS if QUIRE_PLUGINS.is_set() else VLLM_PLUGINS
    names = variable.get()
    if names is None:
        return [installed[name] for name in sorted(installed)]
    for name in names:
        if name not in installed:
            logger.warning(
                "%s names %r, which no installed package provides; installed: %s",
                variable.name,
                name,
                ", ".join(sorted(installed)) or "none",
            )
    return [installed[name] for name in sorted(set(names) & installed.keys())]


def _run(plugin: EntryPoint) -> bool:
    try:
        plugin.load()()
    except Exception as error:
        logger.error(
            "the plugin %s (%s) failed and is skipped: %s: %s",
            plugin.name,
            plugin.value,
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        return False
    return True
