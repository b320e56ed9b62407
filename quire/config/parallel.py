"""Options of running a model on several devices."""

from dataclasses import dataclass

from quire.config.fields import option, validate
from quire.config.values import whole_number


@dataclass
class ParallelConfig:
    """Several devices."""

    tensor_parallel_size: int = option(1, "workers that share every layer", minimum=1)
    pipeline_parallel_size: int = option(1, "stages of layers, one worker after the other", minimum=1)
    pipeline_layers: tuple[int, ...] | None = option(
        None, "layers of each stage; default: evenly, the last and the first with fewer", several="many"
    )
    data_parallel_size: int = option(1, "copies of the model, each with requests of its own; 1 for now", minimum=1)
    distributed_executor_backend: str | None = option(
        None,
        "executor: uni (one worker in the engine's process, the default for one), mp (processes of this machine, the "
        "default for several), ray (actors of a Ray cluster), external_launcher (torchrun starts the ranks), or "
        "your own class as module:Class",
    )
    distributed_timeout_seconds: float = option(
        600.0, "seconds that workers wait for one another: until all have started, and in a collective", minimum=1
    )

    def __post_init__(self) -> None:
        validate(self)
        self._check_layers()
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

    def _check_layers(self) -> None:
        if self.pipeline_layers is None:
            return
        self.pipeline_layers = tuple(whole_number("pipeline_layers", count) for count in self.pipeline_layers)
        if len(self.pipeline_layers) != self.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_layers names {len(self.pipeline_layers)} stages, pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}; they must agree"
            )

    @property
    def num_ranks(self) -> int:
        """Workers of one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
