"""Options of running a model on several devices."""

from dataclasses import dataclass

from quire.config.fields import option, validate


@dataclass
class ParallelConfig:
    """Several devices."""

    tensor_parallel_size: int = option(1, "workers that share every layer", minimum=1)
    pipeline_parallel_size: int = option(1, "stages of layers, one worker after the other", minimum=1)
    data_parallel_size: int = option(1, "copies of the model, each with requests of its own; 1 for now", minimum=1)
    distributed_executor_backend: str | None = option(
        None,
        "executor: uni (one worker in the engine's process, the default for one), mp (processes of this machine, the "
        "default for several), ray (actors of a Ray cluster), external_launcher (this process is one of torchrun's), "
        "or your own class as module:Class",
    )
    distributed_timeout_seconds: float = option(
        600.0, "seconds that workers wait for one another: until all have started, and in a collective", minimum=1
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.data_parallel_size != 1:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size!r}: data parallelism is not available yet; leave it out "
                "or pass 1"
            )
        if self.distributed_executor_backend == "uni" and self.num_ranks > 1:
            raise ValueError(
                f"distributed_executor_backend 'uni' has one worker, but tensor_parallel_size x pipeline_parallel_size "
                f"is {self.num_ranks}; use 'mp', or leave it out (--distributed-executor-backend)"
            )

    @property
    def num_ranks(self) -> int:
        """Workers of one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
