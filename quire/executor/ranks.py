"""What executors of several ranks have in common."""

from quire.config import EngineConfig
from quire.distributed.layout import WorldLayout


def layout_of(config: EngineConfig) -> WorldLayout:
    return WorldLayout(config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)


def check_layers(config: EngineConfig) -> None:
    """Before processes are started, of which there may be many: every stage has a layer."""
    stages, model = config.parallel.pipeline_parallel_size, config.model.hf_config
    layers = (model.get("text_config") or model).get("num_hidden_layers")
    if isinstance(layers, int) and stages > layers:
        raise ValueError(
            f"pipeline_parallel_size is {stages}, but the model has {layers} layers; allowed: 1 to {layers} "
            "(--pipeline-parallel-size)"
        )


def describe_layout(layout: WorldLayout) -> str:
    kinds = {"tensor": layout.tensor, "pipeline": layout.stages}
    shape = " x ".join(f"{kind} parallel {size}" for kind, size in kinds.items() if size > 1)
    return f"{layout.size} ranks ({shape})" if shape else "1 rank"


def answering_rank(layout: WorldLayout) -> int:
    """The first of the last stage."""
    return layout.stage_ranks(0)[-1]


def refuse_connectors(config: EngineConfig, executor: str) -> None:
    if config.transfer.connectors:
        raise ValueError(
            "kv_transfer_config and kv_offloading_size are not available yet with distributed_executor_backend "
            f"{executor!r}"
        )


def no_transfer() -> None:
    """No KV connector reports from another process."""
