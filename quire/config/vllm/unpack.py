"""vLLM's arguments that are objects of options: each becomes the options of the same meaning here."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.config.fields import flag
from quire.config.logs import say_once
from quire.config.structured_outputs import BACKENDS

# Keys that concern vLLM's compiler, or kernels that are not used here: whatever they are, outputs stay the same.
COMPILER = frozenset(
    [
        "mode",
        "level",
        "debug_dump_path",
        "cache_dir",
        "compile_cache_save_format",
        "backend",
        "custom_ops",
        "ir_enable_torch_wrap",
        "splitting_ops",
        "compile_mm_encoder",
        "cudagraph_mm_encoder",
        "encoder_cudagraph_token_budgets",
        "encoder_cudagraph_max_vision_items_per_batch",
        "encoder_cudagraph_max_frames_per_batch",
        "cudagraph_decoder_replay",
        "decoder_replay_cudagraph_capture_sizes",
        "decoder_replay_trim_threshold",
        "compile_sizes",
        "compile_ranges_endpoints",
        "inductor_compile_config",
        "inductor_passes",
        "cudagraph_num_of_warmups",
        "cudagraph_copy_inputs",
        "cudagraph_specialize_lora",
        "use_inductor_graph_partition",
        "pass_config",
        "dynamic_shapes_config",
        "local_cache_dir",
        "fast_moe_cold_start",
        "static_all_moe_layers",
        "use_cudagraph",
        "use_inductor",
        "full_cuda_graph",
    ]
)
ATTENTION = frozenset(
    [
        "minimax_m3_msa_decode_backend",
        "flash_attn_version",
        "flash_attn_max_num_splits_for_cuda_graph",
        "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph",
        "use_trtllm_attention",
        "disable_flashinfer_q_quantization",
        "mla_prefill_backend",
        "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    ]
)
KERNELS = frozenset(["enable_rocm_segmented_attn_autotune", "enable_cutedsl_warmup", "enable_jit_warmup"])


def compilation_config(given: dict[str, Any]) -> dict[str, Any]:
    """Graphs are the part of it that exists here."""
    found = _take(given, "cudagraph_capture_sizes", "max_cudagraph_capture_size")
    if (
        str(given.pop("cudagraph_mode", None) or "").upper().rpartition(".")[2] in ("NONE", "0")
        or given.get("use_cudagraph") is False
    ):
        found["enforce_eager"] = True
    _without_effect("compilation_config", given, COMPILER, "there is no compiler")
    return found


def attention_config(given: dict[str, Any]) -> dict[str, Any]:
    found = _take(given, backend="attention_backend")
    _without_effect("attention_config", given, ATTENTION, "it is of kernels that are not used")
    return found


def kernel_config(given: dict[str, Any]) -> dict[str, Any]:
    names = ("moe_backend", "linear_backend", "sparse_indexer_topk_backend")
    found = _take(given, *names, "enable_flashinfer_autotune", "ir_op_priority")
    _without_effect("kernel_config", given, KERNELS, "it is of kernels that are not used")
    return found


def logging_config(given: dict[str, Any]) -> dict[str, Any]:
    found = _take(given, "log_level", "log_config_file")
    _without_effect("logging_config", given)
    return found


def structured_outputs_config(given: dict[str, Any]) -> dict[str, Any]:
    backend = given.get("backend")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"structured_outputs_config: backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    names = ("backend", "disable_any_whitespace", "disable_additional_properties")
    found = _take(given, **{name: f"structured_outputs_{name}" for name in names})
    found |= _take(given, "reasoning_parser", "reasoning_parser_plugin")
    _without_effect("structured_outputs_config", given)
    return {name: value for name, value in found.items() if value}


def model_loader_extra_config(given: dict[str, Any]) -> dict[str, Any]:
    """Several threads read weights unless one is asked for; vLLM counts them only where it is told to use several."""
    several, threads = given.pop("enable_multithread_load", None), given.pop("num_threads", None)
    if several not in (None, True, False):
        raise ValueError(f"model_loader_extra_config: enable_multithread_load is {several!r}; it must be true or false")
    found = _take(given, pattern="sharded_state_pattern")
    if several and threads is not None:
        found["load_threads"] = threads
    _without_effect("model_loader_extra_config", given)
    return found


OBJECTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "compilation_config": compilation_config,
    "attention_config": attention_config,
    "kernel_config": kernel_config,
    "logging_config": logging_config,
    "structured_outputs_config": structured_outputs_config,
    "model_loader_extra_config": model_loader_extra_config,
}


# Of older releases.
TASKS: dict[str, dict[str, Any]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling", "convert": "reward"},
}


def of_task(task: Any) -> dict[str, Any]:
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"task is {task!r}; allowed: {', '.join(TASKS)}, or runner and convert in its place (--task)")
    return TASKS[task]


def unpack(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their objects unpacked; an option of its own has precedence."""
    found: dict[str, Any] = {}
    for name, read in OBJECTS.items():
        if given.get(name) is not None:
            found |= read(_as_dict(name, given[name]))
    if given.get("task") is not None:
        found |= of_task(given["task"])
    return found | {name: value for name, value in given.items() if name not in OBJECTS and name != "task"}


def logging_options(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """log_level and log_config_file of engine arguments, for the log lines that come before there is a config."""
    found = _as_dict("logging_config", given.get("logging_config") or {})
    names = ("log_level", "log_config_file")
    level, file = (given[name] if given.get(name) is not None else found.get(name) for name in names)
    return level, file


def _as_dict(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if name == "compilation_config" and isinstance(value, int):
        return {"mode": value}
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    raise ValueError(f"{name} is {value!r}; it must be an object ({flag(name)} accepts JSON)")


def _take(given: dict[str, Any], *names: str, **renamed: str) -> dict[str, Any]:
    """Remove these keys; those with a value, under the names of options."""
    taken = {option: given.pop(key, None) for key, option in (dict(zip(names, names, strict=True)) | renamed).items()}
    return {option: value for option, value in taken.items() if value is not None}


def _without_effect(name: str, left: dict[str, Any], known: frozenset[str] = frozenset(), reason: str = "") -> None:
    """Accept keys that change nothing, and any that ask for nothing; refuse the others."""
    for key, value in left.items():
        if key in known:
            say_once(f"{flag(name)}: {key} is accepted: {reason}")
        elif value not in (None, False, "", "auto") and value != {} and value != []:
            raise ValueError(f"not available yet: {key} of {name}, which is {value!r}; leave it out ({flag(name)})")
