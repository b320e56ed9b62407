"""Reference numbers of other engines for the fixed workloads on an H200 and on a CPU, measured by this project.

On the CPU: SmolLM2-135M-Instruct on two cores of a Xeon with AVX-512 and AMX; medians of three runs; vLLM in process,
llama.cpp through its server. A machine without AMX has a fraction of that GEMM rate, so ratios to these are printed on
such a machine alone (`measured_on`).
"""

from dataclasses import dataclass, replace

MACHINE = "two cores of a Xeon with AMX"


def measured_on(cpu: str, cores: int, has_amx: bool) -> bool:
    """Whether the CPU figures are from this kind of machine; ratios on another would be meaningless."""
    return "Xeon" in cpu and cores == 2 and has_amx


@dataclass(frozen=True)
class Bar:
    """What a figure of `quire bench card` is compared with: other engines, the hardware's limit, our own goals."""

    vllm: float | None = None
    llama_cpp: float | None = None
    llama_cpp_file: str = "bf16"
    limit: float | None = None  # weights and KV read at the card's bandwidth, prompts at its GEMM rate
    must: float | None = None
    moonshot: float | None = None

    def without_peers(self) -> "Bar":
        return replace(self, vllm=None, llama_cpp=None)


H200 = "one NVIDIA H200"
VLLM_H200 = "vLLM 0.26.0"

# One H200 in bf16 with random weights; vLLM with its defaults, the better of its two modes. By model, then by row.
H200_BARS: dict[str, dict[str, Bar]] = {
    "qwen3-0.6b": {
        "startup_cold": Bar(64.9, must=25, moonshot=10),
        "startup_warm": Bar(64.9, must=12, moonshot=7),
        "b1_ttft": Bar(11.0, must=6, moonshot=3),
        "b1_tpot": Bar(2.05, limit=0.29, must=1.2, moonshot=0.7),
        "nano": Bar(20_160, limit=34_300, must=26_000, moonshot=29_000),
        "nano_greedy": Bar(22_163),
        "t512_128": Bar(88_114, must=115_000, moonshot=150_000),
        "prefill": Bar(374_537, limit=660_000, must=400_000, moonshot=470_000),
        "prefix": Bar(1.91, must=1.0, moonshot=0.4),
        "ctx6k": Bar(6.79, limit=5.7, must=6.6, moonshot=6.2),
        "server_startup": Bar(84),
    },
    "llama3-8b": {
        "startup_cold": Bar(101.8),
        "startup_warm": Bar(101.8),
        "b1_ttft": Bar(13.1),
        "b1_tpot": Bar(4.90, limit=3.66, must=4.4, moonshot=4.0),
        "nano": Bar(9_452, limit=13_000, must=10_400, moonshot=11_300),
        "nano_greedy": Bar(9_572),
        "t512_128": Bar(33_645, limit=43_600, must=36_000, moonshot=40_000),
        "prefill": Bar(41_593, limit=46_000, must=41_000, moonshot=43_000),
        "prefix": Bar(3.02, must=2.0, moonshot=1.0),
        "ctx6k": Bar(11.15, must=10.8, moonshot=10.2),
    },
    "llama3-8b-fp8": {
        "startup_cold": Bar(108.2),
        "startup_warm": Bar(108.2),
        "b1_ttft": Bar(15.8),
        "b1_tpot": Bar(3.46, limit=2.0, must=3.0, moonshot=2.5),
        "nano": Bar(11_584),
        "nano_greedy": Bar(11_863),
        "t512_128": Bar(42_416),
        "prefill": Bar(63_616, limit=83_000, must=64_000, moonshot=72_000),
        "prefix": Bar(2.61),
        "ctx6k": Bar(10.11),
    },
    "qwen3-30b-a3b": {
        "startup_cold": Bar(137.6, must=45, moonshot=20),
        "startup_warm": Bar(137.6),
        "b1_ttft": Bar(21.2),
        "b1_tpot": Bar(4.09, limit=1.6, must=3.2, moonshot=2.2),
        "nano": Bar(5_402, limit=7_700, must=6_300, moonshot=7_000),
        "nano_greedy": Bar(5_918),
        "t512_128": Bar(32_435, must=38_000, moonshot=55_000),
        "prefill": Bar(68_907, must=69_000, moonshot=82_000),
        "prefix": Bar(2.95),
        "ctx6k": Bar(19.5),
    },
    # vLLM without torch.compile; its own random weights, whose routing collapses on few experts.
    "deepseek-v2-lite": {
        "startup_cold": Bar(101, must=30, moonshot=15),
        "startup_warm": Bar(101),
        "b1_tpot": Bar(3.37, limit=1.2, must=2.3, moonshot=1.7),
        "nano_greedy": Bar(11_631, limit=14_500, must=12_000, moonshot=13_000),
        "t512_128": Bar(36_740, must=60_000, moonshot=80_000),
        "prefill": Bar(93_004, must=95_000, moonshot=115_000),
        "ctx6k": Bar(5.64),
    },
}

# Two cores. smollm2 is dequantized: llama.cpp with the same bf16 weights where it was measured so, else with its Q4_1
# file. vLLM always in bf16: it has no such weights on a CPU.
CPU_BARS: dict[str, dict[str, Bar]] = {
    "smollm2": {
        "startup": Bar(27, 0.56, must=4, moonshot=1.5),
        "latency_ttft": Bar(48, 265, must=40, moonshot=25),
        "latency_decode": Bar(44.9, 57, limit=101, must=72, moonshot=88),
        "throughput": Bar(905, 327, "Q4_1", must=1_200, moonshot=1_700),
        "prefix": Bar(3.17, 22.9, "Q4_1", must=2.2, moonshot=1.5),
        "prefill": Bar(4_485, 456, limit=5_900, must=4_900, moonshot=5_600),
    },
    "smollm2-q4_1": {
        "startup": Bar(27, 0.47, "Q4_1", must=4, moonshot=1.5),
        "latency_ttft": Bar(48, 122, "Q4_1", must=40, moonshot=25),
        "latency_decode": Bar(44.9, 240, "Q4_1", limit=530, must=250),
        "throughput": Bar(905, 327, "Q4_1", must=1_000),
        "prefix": Bar(3.17, 22.9, "Q4_1"),
        "prefill": Bar(4_485, 823, "Q4_1"),
    },
    "qwen3-0.6b": {
        "latency_ttft": Bar(159, 1_015),
        "latency_decode": Bar(17.8, 16.5),
        "throughput": Bar(154, 33),
    },
}

# The serving rows of `quire bench serve`, by row, then by metric. On the H200: Qwen3-0.6B with random weights in bf16.
SERVING_BARS: dict[str, dict[str, Bar]] = {
    "cpu-at-once": {
        "output": Bar(693, 211, "Q4_1", must=900, moonshot=1_300),
        "ttft p50": Bar(1_723, 13_430, "Q4_1"),
        "tpot p50": Bar(115, 113, "Q4_1"),
    },
    "cpu-4": {
        "ttft p50": Bar(82, 42, "Q4_1"),
        "ttft p99": Bar(134, 89, "Q4_1"),
        "tpot p50": Bar(34.7, 24.8, "Q4_1", must=24, moonshot=15),
        "tpot p99": Bar(40.3, 43.9, "Q4_1"),
    },
    "h200-at-once": {
        "output": Bar(12_757, must=20_000, moonshot=30_000),
        "ttft p50": Bar(1_154),
        "ttft p99": Bar(1_784),
        "tpot p50": Bar(29.2),
        "tpot p99": Bar(30.8),
        "itl p99": Bar(48),
    },
    "h200-32": {
        "output": Bar(3_788),
        "ttft p50": Bar(53),
        "ttft p99": Bar(104, must=70, moonshot=40),
        "tpot p50": Bar(5.4),
        "tpot p99": Bar(10.6),
        "itl p99": Bar(30, must=20, moonshot=10),
    },
    "h200-8": {
        "output": Bar(986),
        "ttft p50": Bar(18),
        "ttft p99": Bar(31),
        "tpot p50": Bar(2.3, must=1.4, moonshot=0.8),
        "tpot p99": Bar(3.2),
        "itl p99": Bar(8.5, must=5, moonshot=3),
    },
}

# The machine probe on the two cores that the CPU figures were taken on.
CPU_PROBE = {
    "read_gb_per_s_64_mib": 53.0,
    "read_gb_per_s_512_mib": 28.0,
    "bf16_gflop_per_s_1x1024x3072": 14.0,
    "bf16_gflop_per_s_64x576x1536": 549.0,
    "bf16_gflop_per_s_512x1024x3072": 1466.0,
    "bf16_gflop_per_s_1024x1024x3072": 1837.0,
}
