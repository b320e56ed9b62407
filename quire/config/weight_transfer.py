"""Options of new weights for a running engine."""

from dataclasses import dataclass
from typing import Any

from quire.config.fields import option, require_object, validate

BACKENDS = ("nccl", "gloo")
THEIRS = ("ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress")  # vLLM's


@dataclass
class WeightTransferConfig:
    """New weights from a trainer."""

    weight_transfer_config: dict[str, Any] | None = option(
        None, f'how a trainer sends weights, as JSON: {{"backend": "nccl"}}; backends: {", ".join(BACKENDS)}'
    )

    def __post_init__(self) -> None:
        require_object("weight_transfer_config", self.weight_transfer_config)
        validate(self)
        unknown = (self.weight_transfer_config or {}).keys() - {"backend"}
        if unknown:
            raise ValueError(f"weight_transfer_config has {sorted(unknown)}; allowed: backend")
        backend = self.backend
        if backend is not None and backend not in BACKENDS:
            later = "not available yet; " if backend in THEIRS else ""
            raise ValueError(
                f"weight_transfer_config: backend is {backend!r}; {later}allowed: {', '.join(BACKENDS)}. Weights in "
                "shared memory or in a checkpoint need no backend"
            )

    @property
    def backend(self) -> Any:
        return None if self.weight_transfer_config is None else self.weight_transfer_config.get("backend", BACKENDS[0])
