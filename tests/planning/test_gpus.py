import pytest

from quire.planning.gpus import GPUS, read_machine


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xH100", 8, "H100"),
        ("H200", 1, "H200"),
        ("2xA100-40GB", 2, "A100-40GB"),
        ("2 x a100", 2, "A100-80GB"),
        ("4xL40S", 4, "L40S"),
        ("1xRTX4090", 1, "RTX4090"),
        ("RTX 4090", 1, "RTX4090"),
        ("8xB200", 8, "B200"),
        ("NVIDIA H100-SXM5", 1, "H100"),
    ],
)
def test_names(text: str, count: int, name: str) -> None:
    machine = read_machine(text)
    assert (machine.count, machine.gpu) == (count, GPUS[name])


def test_a_gpu_of_ones_own() -> None:
    machine = read_machine("4x80GB@3.35TB/s,989TF,450GB/s")
    assert (machine.count, machine.gpu.memory, machine.gpu.flops) == (4, 80 * 10**9, 989e12)
    assert machine.gpu.bandwidth == pytest.approx(3.35e12) and machine.gpu.link.bytes_per_s == 450e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH1000", "did you mean H100"),
        ("TPU", "allowed: B300"),
        ("0xH100", "allowed: 1 to 64"),
        ("80GB@0TB/s,989TF", "not above zero"),
        ("80GB@3.3.5TB/s,989TF", "cannot be read"),
        ("", "unknown GPU"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_machine(text)
