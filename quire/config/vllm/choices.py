"""Values of vLLM's options that are not available yet, by option and feature. Imports nothing: the fields check it."""

CHOICES: dict[str, dict[str, str]] = {
    "kv_cache_dtype": {
        "further formats of the KV cache": "fp8_e5m2 fp8_inc fp8_ds_mla int4_per_token_head nvfp4 nvfp4_4over6 "
        "nvfp4_ds_mla turboquant_3bit_nc turboquant_4bit_nc turboquant_k3v4_nc turboquant_k8v4 ultraquant_4bit",
    },
    "moe_backend": {
        "further kernels of mixtures of experts": "aiter aiter_mega_moe aiter_triton_mxfp4_bf16 b12x batched_triton "
        "cutlass deep_gemm deep_gemm_mega_moe emulation flashinfer_b12x flashinfer_cutedsl flashinfer_cutlass "
        "flashinfer_moe_ep_cutedsl flashinfer_moe_ep_mega_deep_gemm flashinfer_trtllm flydsl hpc humming marlin rdna3 "
        "triton_unfused",
    },
    "quantization": {
        "further kernels for AWQ and GPTQ": "moe_wna16 inc",
        "ModelOpt's formats": "modelopt_mxfp8 modelopt_mixed",
        "further formats of weights": "fbgemm_fp8 fp_quant humming experts_int8 quark torchao deepseek_v4_fp8",
        "further quantization while loading": "online fp8_per_block fp8_per_channel int8_per_channel_weight_only "
        "nvfp4_per_token mxfp8",
    },
    "load_format": {
        "loaders of weights from elsewhere": "fastsafetensors instanttensor ipc_cache modelexpress runai_streamer "
        "runai_streamer_sharded tensorizer",
        "further checkpoint formats": "mistral npcache",
    },
    "safetensors_load_strategy": {"torchao's checkpoints": "torchao"},
    "tokenizer_mode": {"tokenizers of single families": "mistral deepseek_v32 deepseek_v4 inkling kimi_k3 cohere"},
    "config_format": {"Mistral's config files": "mistral"},
    "model_impl": {"TerraTorch's models": "terratorch"},
    "attention_backend": {
        "further attention kernels": "FLASH_ATTN FLASH_ATTN_DIFFKV TRITON_ATTN_DIFFKV TRITON_FLASH_ATTN "
        "FLASHINFER TRITON_FLASHINFER B12X NO_ATTENTION FLEX_ATTENTION HPC_ATTN TURBOQUANT ULTRAQUANT CUSTOM",
        "attention kernels of AMD's GPUs": "ROCM_ATTN ROCM_SEGMENTED_ATTN ROCM_AITER_FA ROCM_AITER_UNIFIED_ATTN",
        "further attention over latents, and sparse attention": "ROCM_AITER_MLA ROCM_AITER_TRITON_MLA "
        "ROCM_AITER_MLA_SPARSE XPU_MLA_SPARSE FLASHINFER_MLA "
        "TOKENSPEED_MLA FLASHINFER_MLA_SPARSE FLASHINFER_MLA_SPARSE_SM120 FLASHINFER_MLA_SPARSE_SM90 "
        "CUTLASS_MLA FLASHMLA FLASHMLA_SPARSE FLASHMLA_SPARSE_DSV4 FLASHINFER_MLA_SPARSE_DSV4 "
        "ROCM_FLASHMLA_SPARSE_DSV4 FLASHMLA_SPARSE_DSV41 FLASHINFER_MLA_SPARSE_DSV41 FLASHMLA_MEGA_ATTN_DSV41 "
        "FLASH_ATTN_MLA FLASH_ATTN_MLA_SPARSE MINIMAX_M3_SPARSE CUTLASS_MSA TRITON_MSA AMX_MLA",
    },
}
_FEATURES = {
    name: {choice: feature for feature, choices in features.items() for choice in choices.split()}
    for name, features in CHOICES.items()
}


def to_come(name: str, value: object) -> str:
    """How an error begins about a value that vLLM has and that is to come here; otherwise nothing."""
    feature = _FEATURES.get(name, {}).get(str(value))
    return f"not available yet: {feature}; " if feature is not None else ""
