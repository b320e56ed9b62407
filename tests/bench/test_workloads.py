import hashlib
import json

import pytest

from quire.bench.workloads import CPU_SHAPES, Workload, cpu_workload, gpu_workload, random_workload


def digest(workload: Workload) -> str:
    return hashlib.sha256(json.dumps([workload.prompts, workload.output_lens]).encode()).hexdigest()[:16]


# Digests of the prompts of the reference numbers.
@pytest.mark.parametrize(
    ("name", "qwen", "digests"),
    [
        ("latency", False, ["3eb06b1e4b0b47cd", "3cefabea23242b7f", "d487a7d781098f4a"]),
        ("throughput", False, ["53cdd57b67efa0f7", "78b72ebe225769b6", "99ab0fe9b04661c7"]),
        ("throughput", True, ["ea41fad54ec51bb2", "ce01016f09ea349d", "24b937bb277f2362"]),
        ("prefix", False, ["635ecee8ee7eb049", "ba1292f5905388b0", "4e2061296ca91511"]),
        ("prefill", False, ["2c0d71b7f6bc163c", "d01e8c76903d7253", "8cf3c19b50a69ad0"]),
    ],
)
def test_cpu_prompts_never_change(name: str, qwen: bool, digests: list[str]) -> None:
    assert [digest(cpu_workload(name, repetition, qwen=qwen)) for repetition in range(3)] == digests


@pytest.mark.parametrize(
    ("name", "llama_digest", "qwen_digest"),
    [
        ("b1", "3319fefc7ffcd571", "681bcc8bc0fb0e14"),
        ("nano", "199c6f016a1bff73", "199c6f016a1bff73"),
        ("t512_128", "9e005a996f05403f", "9b647169577b4c25"),
        ("prefill", "bf752c232d96da0d", "ea8c06343e553404"),
        ("prefix", "4c2abe23ec9f7901", "74da1964db181bd3"),
        ("ctx6k", "97bb21e3eb6d6b2a", "d1a3828e7553694e"),
    ],
)
def test_gpu_prompts_never_change(name: str, llama_digest: str, qwen_digest: str) -> None:
    assert digest(gpu_workload(name, vocab_size=128_256)) == llama_digest
    assert digest(gpu_workload(name, vocab_size=151_936)) == qwen_digest


def test_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown workload 'nope'; allowed: latency, throughput, prefix, prefill"):
        cpu_workload("nope", 0)


def test_a_smaller_vocabulary_is_respected() -> None:
    workload = random_workload("throughput", 0, CPU_SHAPES["latency"], token_id_limit=128)
    assert {100 <= token < 128 for token in workload.prompts[0]} == {True}
    with pytest.raises(ValueError, match="the limit is 100, raise it"):
        random_workload("throughput", 0, CPU_SHAPES["latency"], token_id_limit=100)
