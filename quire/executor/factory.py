"""The choice of executor: the one place that knows which there are."""

import importlib

from quire.config import EngineConfig
from quire.config.vllm.choices import to_come
from quire.executor.base import Executor
from quire.executor.ranks import check_layers

# Imported when chosen: a worker imports torch, before which the engine process sets its environment.
_BUILT_IN = {
    "uni": "quire.executor.uniproc:UniProcExecutor",
    "mp": "quire.executor.multiproc:MultiProcExecutor",
    "ray": "quire.executor.ray:RayExecutor",
    "external_launcher": "quire.executor.external_launcher:ExternalLauncherExecutor",
}


def make_executor(config: EngineConfig, in_engine_process: bool = False) -> Executor:
    """Made as `Class(config)`, with its workers started and the model loaded. `in_engine_process`: not in the process
    of the program that sends requests."""
    name = config.parallel.distributed_executor_backend or ("uni" if config.parallel.num_ranks == 1 else "mp")
    if in_engine_process and name == "external_launcher":
        raise ValueError(
            "distributed_executor_backend 'external_launcher' is for programs that make an LLM in each process of "
            "torchrun; a server starts workers itself: use mp or ray"
        )
    if config.parallel.num_ranks > 1:
        check_layers(config)
    module, _, attribute = _BUILT_IN.get(name, name).partition(":")
    if not attribute:
        raise ValueError(
            f"{to_come('distributed_executor_backend', name)}distributed_executor_backend is {name!r}; allowed: "
            f"{', '.join(_BUILT_IN)}, or your own as 'module:Class' (--distributed-executor-backend)"
        )
    try:
        executor_class: type[Executor] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"distributed_executor_backend {name!r} cannot be imported: {error}") from error
    return executor_class(config)  # type: ignore[call-arg]
