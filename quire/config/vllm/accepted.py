"""vLLM's flags that are true here already or have no meaning here: by reason, with the kind of their value. None of
them changes what a model generates."""

ACCEPTED: dict[str, dict[str, str]] = {
    "there is no compiler; kernels are fused and graphs captured at every level": {
        "optimization_level": "int",
        "ir_op_priority": "json",
    },
    "FlashInfer is not used": {
        "enable_flashinfer_autotune": "switch",
    },
    "one device holds the whole model: nothing is exchanged between devices": {
        "enable_expert_parallel": "switch",
        "enable_ep_weight_filter": "switch",
        "all2all_backend": "text",
        "expert_placement_strategy": "text",
        "disable_custom_all_reduce": "switch",
        "max_parallel_loading_workers": "int",
    },
    "there is no state space model that it could change": {
        "mamba_config": "json",
    },
    "it has no effect without --enable-eplb": {
        "eplb_config": "json",
    },
    "it has no effect without --enable-fault-tolerance": {
        "fault_tolerance_config": "json",
    },
    "there is one engine, with one log line": {
        "aggregate_engine_logging": "switch",
    },
    "/load always counts requests": {
        "enable_server_load_tracking": "switch",
    },
    "every response has the header X-Request-Id": {
        "enable_request_id_headers": "switch",
    },
    "/render, /derender and /inference/v1/generate are always served": {
        "enable_scale_out": "switch",
    },
    "/docs needs nothing from elsewhere": {
        "enable_offline_docs": "switch",
    },
    "sleep mode brings the allocator that it needs": {
        "enable_cumem_allocator": "switch",
    },
    "no metric is hidden": {
        "show_hidden_metrics_for_version": "text",
    },
    "a request's span always has its times in the queue, in prefill and in decode": {
        "collect_detailed_traces": "texts",
    },
    "no method is refused for being deprecated": {
        "allow_deprecated_quantization": "switch",
    },
    "only language models are served": {
        "language_model_only": "switch",
        "skip_mm_profiling": "switch",
        "mm_device_do_normalize": "switch",
    },
    "weights go from the file to where they are computed with": {
        "pt_load_map_location": "any",
    },
    "safetensors files are memory-mapped and read once, in order": {
        "safetensors_prefetch_num_threads": "int",
        "safetensors_prefetch_block_size": "int",
    },
    "vLLM sets it itself": {
        "_api_process_count": "int",
        "_api_process_rank": "int",
    },
    "vLLM has removed it; there is nothing that it could change here": {
        "swap_space": "float",
        "use_v2_block_manager": "switch",
        "disable_async_output_proc": "switch",
        "max_seq_len_to_capture": "int",
        "num_lookahead_slots": "int",
        "disable_frontend_multiprocessing": "switch",
    },
    "vLLM has removed it; requests are logged only with --enable-log-requests": {
        "disable_log_requests": "switch",
    },
    "vLLM has removed it; reasoning is split off wherever there is a parser for it": {
        "enable_reasoning": "switch",
    },
}

# Options of the server that vLLM's EngineArgs has too: for `LLM(...)` they have no meaning.
SERVER_ARGUMENTS = (
    "served_model_name",
    "tokens_only",
    "otlp_traces_endpoint",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "reasoning_config",
    "shutdown_timeout",
    "renderer_num_workers",
    "enable_log_requests",
)
