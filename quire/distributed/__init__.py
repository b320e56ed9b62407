"""Links to other processes; and vLLM's functions that take down what an engine leaves behind."""

import gc


def destroy_model_parallel() -> None:
    """Nothing outlives an engine that was shut down."""


destroy_distributed_environment = destroy_model_parallel


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that are no longer referenced."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
