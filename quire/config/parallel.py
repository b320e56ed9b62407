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
    nnodes: int = option(1, "machines, each with an equal part of the workers", minimum=1)
    node_rank: int = option(0, "this machine's number among them; 0: the one with the engine", minimum=0)
    master_addr: str = option("127.0.0.1", "with --nnodes: the address of node 0 that others connect to")
    master_port: int = option(
        29501, "with --nnodes: the port there; ranks meet at the next one", minimum=1, maximum=65534
    )

    def __post_init__(self) -> None:
        validate(self)
        self._check_layers()
        self._check_nodes()
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

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"node_rank is {self.node_rank}, nnodes is {self.nnodes}; allowed: 0 to {self.nnodes - 1} (--node-rank)"
            )
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size x pipeline_parallel_size is {self.num_ranks}, nnodes is {self.nnodes}; every "
                "machine has as many workers, so that nnodes must divide their number (--nnodes)"
            )
        if self.nnodes > 1 and self.distributed_executor_backend not in (None, "mp"):
            raise ValueError(
                f"nnodes is {self.nnodes}, which distributed_executor_backend {self.distributed_executor_backend!r} "
                "does not use; leave out one of both, or use 'mp' (--nnodes)"
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
