import pytest

from quire import LLM


@pytest.fixture(scope="package")
def llm(tmp_path_factory):
    profiles = {"profiler": "torch", "torch_profiler_dir": str(tmp_path_factory.mktemp("profiles"))}
    with LLM(max_model_len=256, kv_cache_memory_bytes=1 << 27, max_logprobs=50, profiler_config=profiles) as llm:
        yield llm
