import dataclasses

import pytest
import torch

from quire.config import EngineConfig
from quire.config.pooling import PoolingSetup
from quire.platforms import cpu_facts, current_platform
from quire.platforms.defaults import with_platform_defaults


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


@pytest.mark.parametrize(
    ("pools", "given", "expected"), [(False, None, (2048, 0)), (True, None, (4096, 2048)), (True, 4096, (4096, 0))]
)
def test_steps_of_models_that_pool(pools, given, expected):
    config = EngineConfig.from_kwargs(device="cpu", cpu_threads=1, max_num_batched_tokens=given)
    if pools:
        config = config.replace(pooling=dataclasses.replace(config.pooling, setup=PoolingSetup("embed", ("embed",))))
    scheduler = with_platform_defaults(config).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.short_step_tokens) == expected
