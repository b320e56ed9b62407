"""Where the ranks of one machine run: a GPU each, or a share of the cores."""

import dataclasses

from quire.config import EngineConfig
from quire.config.environment import QUIRE_SHARE_GPU
from quire.executor.worker_processes import WorkerStart
from quire.platforms import cpu_cores, platform_class


class Places:
    def __init__(self, config: EngineConfig, ranks: int) -> None:
        """ValueError if there are fewer devices than ranks."""
        self.backend = "gloo"
        self._threads, self._cpus, self._gpus = 0, [], []  # type: int, list[tuple[int, ...]], list[int]
        if not platform_class(config.device.device).has_own_memory:
            self._share_cores(ranks, config.device.cpu_threads, config.device.cpu_pin)
            return
        self._gpus = gpu_of_each(ranks)
        if len(set(self._gpus)) == ranks:
            self.backend = "nccl"

    def place(self, start: WorkerStart) -> WorkerStart:
        """With the options of its rank."""
        if self._gpus:
            return dataclasses.replace(start, local_rank=self._gpus[start.reader])
        device = dataclasses.replace(start.config.device, cpu_threads=self._threads)
        cpus = self._cpus[start.reader] if self._cpus else None
        config = start.config.replace(device=device)
        return dataclasses.replace(start, local_rank=start.reader, cpus=cpus, config=config)

    def _share_cores(self, ranks: int, requested: int | None, pin: bool) -> None:
        """Only if the ranks' threads fill all cores each keeps to its own, and only those of one engine of the
        machine: with fewer threads the kernel places them better."""
        self._threads = threads = max(1, cpu_cores.choose_threads(requested) // ranks)
        cores = cpu_cores.physical_cores()
        if not pin or not threads * ranks == len(cores) == cpu_cores.usable_cores():
            return
        chosen = cpu_cores.choose_cores(cores, threads * ranks)
        self._claim = cpu_cores.Claim([core.cpus[0] for core in chosen])
        if self._claim.granted:
            parts = [chosen[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
            self._cpus = [tuple(cpu for core in part for cpu in core.cpus) for part in parts]


def device_count(config: EngineConfig) -> int | None:
    """Ranks that this machine has a GPU for, or may share one; None on a CPU."""
    if not platform_class(config.device.device).has_own_memory:
        return None
    import torch

    count = torch.cuda.device_count()
    return max(count, config.parallel.num_ranks) if QUIRE_SHARE_GPU.get() and count else count


def gpu_of_each(ranks: int) -> list[int]:
    """The number of each rank's device."""
    import torch

    count = torch.cuda.device_count()
    if ranks <= count:
        return list(range(ranks))
    if QUIRE_SHARE_GPU.get() and count:
        return [rank % count for rank in range(ranks)]
    raise ValueError(
        f"tensor_parallel_size x pipeline_parallel_size is {ranks}, but this machine has {count} GPU"
        f"{'' if count == 1 else 's'} (CUDA_VISIBLE_DEVICES may hide some); allowed: at most {count}"
    )
