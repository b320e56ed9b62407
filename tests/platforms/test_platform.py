import pytest
import torch

from quire.platforms import cpu_facts, current_platform


def test_cpu_platform():
    platform = current_platform("cpu")
    assert platform.device == torch.device("cpu")
    assert platform.available_memory() > 0
    assert platform.default_dtype("float32") is torch.float32
    platform.check_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match="allowed: float32"):
        platform.check_dtype(torch.int8)


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_only_where_it_is_fast(monkeypatch, fast, expected):
    monkeypatch.setattr(cpu_facts, "has_fast_bf16", lambda cpuid: fast)
    platform = current_platform("cpu")
    assert [platform.default_dtype(d) for d in (None, "bfloat16", "float16")] == [expected] * 3


def test_unknown_device():
    with pytest.raises(ValueError, match="'tpu'; allowed: auto, cpu, cuda"):
        current_platform("tpu")
