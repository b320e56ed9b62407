"""Options of running a model on several devices."""

from dataclasses import dataclass

from quire.config.fields import option, validate


@dataclass
class ParallelConfig:
    """Several devices."""

    tensor_parallel_size: int = option(1, "workers that share every layer; 1 for now", minimum=1)
    pipeline_parallel_size: int = option(1, "stages of layers, one worker after the other; 1 for now", minimum=1)
    data_parallel_size: int = option(1, "copies of the model, each with requests of its own; 1 for now", minimum=1)
    distributed_executor_backend: str | None = option(
        None, "executor: uni (one worker in the engine's process, the default), or your own class as module:Class"
    )

    def __post_init__(self) -> None:
        validate(self)
        for feature in ("tensor", "pipeline", "data"):
            name = f"{feature}_parallel_size"
            value = getattr(self, name)
            if value != 1:
                raise ValueError(
                    f"{name}={value!r}: {feature} parallelism is not available yet; leave it out or pass 1"
                )
