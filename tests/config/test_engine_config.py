import pytest

from quire.config import CacheConfig, EngineConfig


def test_flat_arguments_reach_their_part() -> None:
    config = EngineConfig.from_kwargs(model="m", block_size=32, max_num_seqs=8, load_format="dummy", device="cpu")
    assert config.model.model == "m"
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 8
    assert config.load.load_format == "dummy"
    assert config.device.device == "cpu"


def test_defaults_apply_where_nothing_is_given() -> None:
    assert EngineConfig.from_kwargs() == EngineConfig()


def test_unknown_argument_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown engine argument 'max_model_length'; did you mean 'max_model_len'"):
        EngineConfig.from_kwargs(max_model_length=5)


def test_unknown_argument_without_a_neighbour_lists_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"allowed: .*block_size.*max_num_seqs"):
        EngineConfig.from_kwargs(zzz=5)


def test_fields_that_quire_fills_in_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="unknown engine argument 'hf_config'"):
        EngineConfig.from_kwargs(hf_config={})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("block_size", 0, r"block_size is 0; it must be between 1 and 1024 \(--block-size\)"),
        ("block_size", "16", "block_size is '16'; it must be"),
        ("block_size", True, "block_size is True; it must be"),
        ("gpu_memory_utilization", 1.5, "between 0.01 and 1"),
        ("max_model_len", 0, "at least 1"),
        ("dtype", "int8", "dtype is 'int8'; allowed: auto, float32, bfloat16, float16"),
        ("scheduling_policy", None, "allowed: fcfs, priority"),
        ("model_impl", "torch", "model_impl is 'torch'; allowed: auto, quire, transformers, vllm"),
        ("hf_overrides", "{}", "hf_overrides is '{}'; it must be a dict with strings as keys"),
        ("override_generation_config", {1: 2}, r"it must be a dict .* \(--override-generation-config accepts a JSON"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(**{option: value})


def test_optional_fields_accept_none() -> None:
    assert EngineConfig.from_kwargs(max_model_len=None, kv_cache_memory_bytes=None) == EngineConfig()


def test_a_part_validates_itself() -> None:
    with pytest.raises(ValueError, match="block_size"):
        CacheConfig(block_size=5000)


def test_vllms_name_for_own_code_is_ours() -> None:
    assert EngineConfig.from_kwargs(model_impl="vllm").model.model_impl == "quire"
