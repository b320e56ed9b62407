"""vLLM's arguments that are objects of options."""

from typing import Any

import pytest

from quire.config import EngineConfig


@pytest.mark.parametrize(
    ("objects", "options"),
    [
        ({"compilation_config": {}}, {}),
        ({"compilation_config": 3}, {}),
        ({"compilation_config": {"mode": 3, "custom_ops": ["none"], "pass_config": {"fuse_norm_quant": True}}}, {}),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"enforce_eager": True}),
        ({"compilation_config": {"use_cudagraph": False}}, {"enforce_eager": True}),
        ({"compilation_config": {"use_cudagraph": True}}, {"enforce_eager": False}),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, {}),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, {"cudagraph_capture_sizes": (1, 2)}),
        ({"compilation_config": {"max_cudagraph_capture_size": 8}}, {"max_cudagraph_capture_size": 8}),
        ({"attention_config": {"backend": "TRITON_ATTN", "flash_attn_version": 3}}, {"attention_backend": "triton"}),
        ({"attention_config": {"backend": None}}, {}),
        ({"kernel_config": {"moe_backend": "triton", "linear_backend": "auto"}}, {"moe_backend": "triton"}),
        ({"logging_config": {"log_level": "DEBUG"}}, {"log_level": "DEBUG"}),
        ({"structured_outputs_config": {"backend": "guidance"}}, {"structured_outputs_backend": "guidance"}),
        ({"structured_outputs_config": {"backend": "auto", "disable_any_whitespace": False}}, {}),
        (
            {"structured_outputs_config": {"disable_any_whitespace": True}},
            {"structured_outputs_disable_any_whitespace": True},
        ),
        ({"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3}}, {"load_threads": 3}),
        ({"model_loader_extra_config": {"enable_multithread_load": True}}, {}),
        ({"model_loader_extra_config": {"num_threads": 3}}, {}),
        (
            {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "{rank}-{part}.safetensors"}},
            {"load_format": "sharded_state", "sharded_state_pattern": "{rank}-{part}.safetensors"},
        ),
        ({"model_loader_extra_config": {}}, {}),
    ],
)
def test_options_in_objects(objects: dict[str, Any], options: dict[str, Any]) -> None:
    assert EngineConfig.from_kwargs(**objects) == EngineConfig.from_kwargs(**options)


def test_an_option_of_its_own_has_precedence() -> None:
    config = EngineConfig.from_kwargs(attention_config={"backend": "torch"}, attention_backend="native")
    assert config.device.attention_backend == "native"


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"structured_outputs_config": {"enable_in_reasoning": True}}, "not available yet: enable_in_reasoning"),
        ({"structured_outputs_config": {"backend": "mine"}}, "backend is 'mine'; allowed: auto, xgrammar"),
        ({"attention_config": {"indexer_kv_dtype": "fp8"}}, "not available yet: indexer_kv_dtype of attention_config"),
        ({"kernel_config": {"linear_backend": "marlin"}}, "not available yet: choice of kernels for linear layers"),
        ({"compilation_config": {"modus": 3}}, "not available yet: modus of compilation_config"),
        ({"model_loader_extra_config": {"tensorizer_uri": "x"}}, "not available yet: tensorizer_uri"),
        (
            {"model_loader_extra_config": {"enable_multithread_load": 2}},
            "enable_multithread_load is 2; it must be true",
        ),
        ({"model_loader_extra_config": {"pattern": "a.safetensors"}}, "must be a file name with {rank} and {part}"),
        ({"model_loader_extra_config": {"pattern": "{rank}{part}.safetensors"}}, "is for load_format 'sharded_state'"),
        (
            {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 0}},
            "load_threads is 0; it must be between 1 and 256",
        ),
        ({"compilation_config": "3"}, "compilation_config is '3'; it must be an object"),
    ],
)
def test_what_an_object_asks_for_in_vain_is_refused(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(**objects)
