"""Options of the hardware and its kernels."""

from dataclasses import dataclass

from quire.config.fields import option, validate
from quire.config.values import whole_number

# vLLM's names of attention backends that do what ours does.
ATTENTION_ALIASES = {
    "TRITON_ATTN": "triton",
    "CPU_ATTN": "native",
    "TORCH_SDPA": "torch",
    "TRITON_MLA": "triton_mla",
    "CPU_MLA": "native_mla",
}


@dataclass
class DeviceConfig:
    """The hardware."""

    device: str = option("auto", "where to run", choices=("auto", "cpu", "cuda"))
    attention_backend: str | None = option(None, "attention kernels; default: the best for the platform")
    moe_backend: str = option("auto", "kernels of mixtures of experts", choices=("auto", "triton", "native", "torch"))
    enforce_eager: bool = option(False, "on a GPU: launch every kernel by itself, without CUDA graphs")
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, "on a GPU: sizes of steps that are captured as CUDA graphs; default: by max_num_seqs", several="many"
    )
    max_cudagraph_capture_size: int | None = option(None, "on a GPU: largest of these sizes; 0: none", minimum=0)
    disable_cascade_attn: bool = option(False, "attend to a prefix that requests share once for each of them")
    batch_invariant: bool = option(
        False, "on a GPU: a request's tokens and logprobs do not depend, to the bit, on what is computed beside it"
    )
    cpu_threads: int | None = option(
        None, "on a CPU: threads that compute; default: the physical cores this process may use", minimum=1
    )
    cpu_pin: bool = option(True, "on a CPU: bind those threads to their cores, if they fill all of them")

    def __post_init__(self) -> None:
        if self.cudagraph_capture_sizes is not None:
            self.cudagraph_capture_sizes = tuple(self.cudagraph_capture_sizes)
            for size in self.cudagraph_capture_sizes:
                whole_number("cudagraph_capture_sizes", size)
        if self.attention_backend is not None:
            self.attention_backend = ATTENTION_ALIASES.get(self.attention_backend.upper(), self.attention_backend)
        validate(self)
