"""Options of logging, and of watching over the engine process."""

from dataclasses import dataclass
from typing import Any

from quire.config.environment import LOG_LEVELS
from quire.config.fields import option, require_object, validate

# Of histograms that have the same bounds, with vLLM's names.
FAMILIES = (
    "request_latency",
    "time_to_first_token",
    "inter_token_latency",
    "request_tokens",
    "request_params_n",
    "request_num_preemptions",
)


@dataclass
class ObservabilityConfig:
    """Logging and health checks."""

    log_level: str | None = option(None, "lowest level of log lines; default: INFO", choices=LOG_LEVELS)
    log_config_file: str | None = option(None, "JSON file that configures logging, for logging.config.dictConfig")
    kv_cache_metrics: bool = option(False, "measure how long blocks stay in the KV cache")
    kv_cache_metrics_sample: float = option(0.01, "part of the blocks that are measured", minimum=1e-6, maximum=1.0)
    custom_histogram_buckets: dict[str, Any] | None = option(
        None,
        f'bounds of histograms in /metrics, as JSON: {{"request_latency": [0.1, 1]}}; also {", ".join(FAMILIES[1:])}',
    )
    disable_log_stats: bool = option(False, "no log line about load and throughput every 10 s of a server's work")

    per_request_spec_decode_metrics: str = option(
        "none",
        "a request's drafts and how many were accepted, in its output and in the metrics of a response; detailed: also "
        "step by step",
        choices=("none", "summary", "detailed"),
    )
    profiler_config: dict[str, Any] | None = option(
        None, 'what start_profile records, as JSON: {"profiler": "torch", "torch_profiler_dir": "FOLDER"}'
    )
    engine_heartbeat_timeout: float = option(
        30.0, "seconds without a heartbeat after which an engine process counts as stopped; 0: never", minimum=0
    )
    engine_stall_timeout: float = option(
        300.0, "seconds that one step may take before the engine counts as stuck; 0: any", minimum=0
    )
    engine_call_timeout: float = option(
        30.0, "timeout in seconds for calls to an engine, such as for its state", minimum=0.001
    )

    def __post_init__(self) -> None:
        require_object("profiler_config", self.profiler_config)
        validate(self)
        require_object("custom_histogram_buckets", self.custom_histogram_buckets)
        for family, bounds in (self.custom_histogram_buckets or {}).items():
            if family not in FAMILIES:
                allowed = ", ".join(FAMILIES)
                raise ValueError(
                    f"custom_histogram_buckets has {family!r}; allowed: {allowed} (--custom-histogram-buckets)"
                )
            if not isinstance(bounds, list | tuple) or not bounds or list(bounds) != sorted(set(bounds)):
                raise ValueError(
                    f"custom_histogram_buckets: {family} is {bounds!r}; it must be a list of ascending numbers "
                    "(--custom-histogram-buckets)"
                )
