"""Counters and times of an engine, named like vLLM's with the prefix `quire:`. docs/metrics.md lists them."""

import dataclasses
import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence

from quire.config import CacheConfig
from quire.messages.kv_transfer import TierStats
from quire.messages.lora import AdapterStats
from quire.messages.requests import RESIDENCY_SECONDS, STEP_TOKEN_BOUNDS, FinishReason, SchedulerStats
from quire.messages.sampling_params import SamplingParams
from quire.messages.speculation import DraftStats
from quire.metrics.kinds import Counter, Gauge, Metric, Observations, histogram
from quire.metrics.request import RequestMetrics

# vLLM's buckets, preceded by smaller ones for small models and fast devices.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
ENGINE = "0"  # the label that tells data-parallel engines apart
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class EngineMetrics:
    """A front end's metrics of its own requests."""

    def __init__(self, buckets: Mapping[str, Sequence[float]] | None = None) -> None:
        """`buckets` are bounds of the user's own, by family of histograms."""
        own = buckets or {}
        first_token, token = (
            own.get("time_to_first_token", FIRST_TOKEN_SECONDS),
            own.get("inter_token_latency", TOKEN_SECONDS),
        )
        request, tokens = own.get("request_latency", REQUEST_SECONDS), own.get("request_tokens", TOKENS)
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.corrupted_requests = 0
        self.finish_reasons: Tally[str] = Tally()
        self.time_to_first_token = Observations(first_token)
        self.inter_token = Observations(token)
        self.per_output_token = Observations(token)
        self.latency = Observations(request)
        self.queue = Observations(request)
        self.prefill = Observations(request)
        self.decode = Observations(request)
        self.inference = Observations(request)
        self.request_prompt_tokens = Observations(tokens)
        self.request_computed_tokens = Observations(tokens)
        self.request_generation_tokens = Observations(tokens)
        self.request_longest = Observations(tokens)
        self.request_max_tokens = Observations(tokens)
        self.request_n = Observations(own.get("request_params_n", COMPLETIONS))
        self.request_preemptions = Observations(own.get("request_num_preemptions", PREEMPTIONS))

    def generated(self, count: int) -> None:
        self.generation_tokens += count

    def first_token(self, seconds: float, num_prompt_tokens: int, num_cached: int) -> None:
        self.time_to_first_token.add(seconds)
        self.prompt_tokens += num_prompt_tokens
        self.cached_prompt_tokens += num_cached

    def pooled(self, num_prompt_tokens: int, num_cached: int) -> None:
        self.prompt_tokens += num_prompt_tokens
        self.cached_prompt_tokens += num_cached

    def between_tokens(self, now: float, before: Mapping[float, int]) -> None:
        """`before` counts the completions with a new token by the time of their previous one, of which few differ."""
        for then, count in before.items():
            self.inter_token.add(now - then, count)

    def finished(self, reason: str) -> None:
        """A completion finished; a request has `n`."""
        self.finish_reasons[reason] += 1

    def ended(
        self,
        times: RequestMetrics,
        params: SamplingParams | None,
        num_prompt_tokens: int,
        num_cached: int,
        num_tokens: Sequence[int],
    ) -> None:
        """A request finished with all its completions; `num_tokens` is per completion. `params`: None if it pools."""
        longest = max(num_tokens)
        self.request_prompt_tokens.add(num_prompt_tokens)
        self.request_computed_tokens.add(num_prompt_tokens - num_cached)
        self.request_generation_tokens.add(sum(num_tokens))
        self.request_longest.add(longest)
        self.request_preemptions.add(times.num_preemptions)
        if params is not None:
            self.request_n.add(params.n)
            if params.max_tokens is not None:
                self.request_max_tokens.add(params.max_tokens)
        assert times.finished_time is not None
        self.latency.add(times.finished_time - times.arrival_time)
        for observations, seconds in (
            (self.queue, times.time_in_queue),
            (self.prefill, times.time_in_prefill),
            (self.decode, times.time_in_decode),
            (self.inference, times.time_in_inference),
        ):
            if seconds is not None:
                observations.add(seconds)
        if times.time_in_decode is not None and longest > 1:
            self.per_output_token.add(times.time_in_decode / (longest - 1))

    def snapshot(self, stats: SchedulerStats, model_name: str) -> list[Metric]:
        labels = {"model_name": model_name, "engine": ENGINE}
        cached, computed = self.cached_prompt_tokens, self.prompt_tokens - self.cached_prompt_tokens
        named = {
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token,
            "request_time_per_output_token_seconds": self.per_output_token,
            "e2e_request_latency_seconds": self.latency,
            "request_queue_time_seconds": self.queue,
            "request_prefill_time_seconds": self.prefill,
            "request_decode_time_seconds": self.decode,
            "request_inference_time_seconds": self.inference,
            "request_prompt_tokens": self.request_prompt_tokens,
            "request_prefill_kv_computed_tokens": self.request_computed_tokens,
            "request_generation_tokens": self.request_generation_tokens,
            "request_max_num_generation_tokens": self.request_longest,
            "request_params_max_tokens": self.request_max_tokens,
            "request_params_n": self.request_n,
            "request_num_preemptions": self.request_preemptions,
        }
        return [
            *scheduler_metrics(stats, labels),
            Counter("quire:prompt_tokens", labels, self.prompt_tokens),
            Counter("quire:prompt_tokens_cached", labels, cached),
            Counter("quire:prompt_tokens_by_source", {**labels, "source": "local_compute"}, computed),
            Counter("quire:prompt_tokens_by_source", {**labels, "source": "local_cache_hit"}, cached),
            Counter("quire:generation_tokens", labels, self.generation_tokens),
            Counter("quire:corrupted_requests", labels, self.corrupted_requests),
            *(
                Counter("quire:request_success", {**labels, "finished_reason": reason}, self.finish_reasons[reason])
                for reason in map(str, FinishReason)
                if reason != str(FinishReason.NONE)
            ),
            *(seen.histogram(f"quire:{name}", labels) for name, seen in named.items()),
        ]


RESIDENCY = ("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds")


def scheduler_metrics(stats: SchedulerStats, labels: dict[str, str]) -> list[Metric]:
    at, bounds = stats.time, STEP_TOKEN_BOUNDS
    cached = {"device": stats.prefix_cache_hits, "external_unspecified": stats.external_cache_hits}
    waiting = {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}
    return [
        Gauge("quire:num_requests_running", labels, stats.num_running, as_of=at),
        Gauge("quire:num_requests_waiting", labels, stats.num_waiting, as_of=at),
        *(
            Gauge("quire:num_requests_waiting_by_reason", {**labels, "reason": reason}, count, as_of=at)
            for reason, count in waiting.items()
        ),
        *(
            Gauge(
                "quire:engine_sleep_state", {**labels, "sleep_state": state}, int(level == stats.sleep_level), as_of=at
            )
            for level, state in enumerate(SLEEP_STATES)
        ),
        Gauge("quire:kv_cache_usage_perc", labels, stats.kv_cache_usage, as_of=at),
        Counter("quire:num_preemptions", labels, stats.num_preemptions, as_of=at),
        Counter("quire:prefix_cache_queries", labels, stats.prefix_cache_queries, as_of=at),
        Counter("quire:prefix_cache_hits", labels, stats.prefix_cache_hits, as_of=at),
        Counter("quire:external_prefix_cache_queries", labels, stats.external_cache_queries, as_of=at),
        Counter("quire:external_prefix_cache_hits", labels, stats.external_cache_hits, as_of=at),
        *(
            Counter("quire:prompt_tokens_cached_by_source", {**labels, "source": source}, count, as_of=at)
            for source, count in cached.items()
        ),
        histogram("quire:iteration_tokens_total", labels, bounds, stats.step_tokens, stats.step_tokens_sum, at),
        *draft_metrics(stats.drafts, labels, at),
        *adapter_metrics(stats.adapters, labels, at),
        *(metric for tier in stats.tiers for metric in tier_metrics(tier, {**labels, "tier": tier.tier}, at)),
        *(
            histogram(f"quire:{name}", labels, RESIDENCY_SECONDS, list(map(int, counts)), total, at)
            for name, (*counts, total) in zip(RESIDENCY, stats.residency, strict=False)
        ),
    ]


def draft_metrics(drafts: DraftStats | None, labels: dict[str, str], at: float) -> list[Metric]:
    if drafts is None:
        return []
    by_position = enumerate(drafts.accepted_by_position)
    name = "quire:spec_decode_num_accepted_tokens_per_pos"
    return [
        Counter("quire:spec_decode_num_drafts", labels, drafts.num_drafts, as_of=at),
        Counter("quire:spec_decode_num_draft_tokens", labels, drafts.num_draft_tokens, as_of=at),
        Counter("quire:spec_decode_num_accepted_tokens", labels, drafts.num_accepted_tokens, as_of=at),
        *(Counter(name, {**labels, "position": str(i)}, count, as_of=at) for i, count in by_position),
    ]


def adapter_metrics(adapters: AdapterStats | None, labels: dict[str, str], at: float) -> list[Metric]:
    if adapters is None:
        return []
    names = {
        "max_lora": str(adapters.max_loras),
        "running_lora_adapters": ",".join(adapters.running),
        "waiting_lora_adapters": ",".join(adapters.waiting),
    }
    return [
        # Of the wall clock, as vLLM has it: of several series the newest holds.
        Gauge("quire:lora_requests_info", {**labels, **names}, at + time.time() - time.monotonic(), as_of=at),
        Gauge("quire:lora_adapters_in_host_memory", labels, adapters.num_host, as_of=at),
        Gauge("quire:lora_adapters_in_slots", labels, adapters.num_device, as_of=at),
        Gauge("quire:lora_adapters_waiting", labels, len(adapters.waiting), as_of=at),
        Counter("quire:lora_adapters_loaded", labels, adapters.num_loads, as_of=at),
        Counter("quire:lora_adapters_evicted", labels, adapters.num_evicted, as_of=at),
    ]


def tier_metrics(tier: TierStats, labels: dict[str, str], at: float) -> list[Metric]:
    copies: dict[str, dict[str, float]] = {
        "copied_blocks": {"save": tier.saved_blocks, "load": tier.loaded_blocks},
        "copied_bytes": {"save": tier.saved_bytes, "load": tier.loaded_bytes},
        "copy_seconds": {"save": tier.save_seconds, "load": tier.load_seconds},
    }
    return [
        Gauge("quire:kv_tier_blocks", labels, tier.blocks, as_of=at),
        Gauge("quire:kv_tier_usage_perc", labels, tier.blocks / tier.capacity if tier.capacity else 0.0, as_of=at),
        Counter("quire:kv_tier_queries", labels, tier.queries, as_of=at),
        Counter("quire:kv_tier_hits", labels, tier.hits, as_of=at),
        Counter("quire:kv_tier_restored_tokens", labels, tier.restored, as_of=at),
        Counter("quire:kv_tier_evicted_blocks", labels, tier.evicted_blocks, as_of=at),
        Counter("quire:kv_tier_waits", labels, tier.waits, as_of=at),
        *(
            Counter("quire:kv_tier_dropped_blocks", {**labels, "reason": reason}, count, as_of=at)
            for reason, count in tier.dropped_blocks.items()
        ),
        *(
            Counter("quire:kv_tier_errors", {**labels, "operation": operation}, count, as_of=at)
            for operation, count in tier.errors.items()
        ),
        *(
            Gauge("quire:kv_tier_latency_seconds", {**labels, "operation": name, "quantile": str(p / 100)}, s, as_of=at)
            for name, percentiles in tier.latencies.items()
            for p, s in percentiles.items()
        ),
        *(
            Counter(f"quire:kv_tier_{name}", {**labels, "direction": direction}, count, as_of=at)
            for name, counts in copies.items()
            for direction, count in counts.items()
        ),
    ]


def cache_config_info(config: CacheConfig, num_blocks: int, model_name: str, max_model_len: int) -> Gauge:
    """The KV cache's configuration, as labels."""
    labels = {name: str(value) for name, value in sorted(dataclasses.asdict(config).items())}
    labels |= {"model_name": model_name, "engine": ENGINE, "num_gpu_blocks": str(num_blocks)}
    tokens = num_blocks * config.block_size
    labels |= {"kv_cache_size_tokens": str(tokens), "kv_cache_max_concurrency": f"{tokens / max_model_len:.2f}"}
    return Gauge("quire:cache_config_info", labels, 1, as_of=0.0)


HELP = {
    "quire:num_requests_running": "Requests running in the engine.",
    "quire:num_requests_waiting": "Requests waiting to be scheduled.",
    "quire:num_requests_waiting_by_reason": "Those waiting for capacity, and those deferred for something else.",
    "quire:engine_sleep_state": "1 for the state the engine is in.",
    "quire:kv_cache_usage_perc": "Used fraction of the KV cache, from 0 to 1.",
    "quire:num_preemptions": "Requests preempted: their KV blocks were freed and recomputed later.",
    "quire:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "quire:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "quire:external_prefix_cache_queries": "Prompt tokens that KV connectors were asked for.",
    "quire:external_prefix_cache_hits": "Prompt tokens that KV connectors load.",
    "quire:kv_block_lifetime_seconds": "From a KV block's allocation to its eviction.",
    "quire:kv_block_idle_before_evict_seconds": "From a KV block's last use to its eviction.",
    "quire:kv_block_reuse_gap_seconds": "Between two hits of a KV block.",
    "quire:spec_decode_num_drafts": "Steps of a row in which it verified drafts.",
    "quire:spec_decode_num_draft_tokens": "Draft tokens verified.",
    "quire:spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "quire:spec_decode_num_accepted_tokens_per_pos": "Draft tokens accepted, by position among a row's drafts.",
    "quire:lora_requests_info": "Labels: adapters of running and waiting requests. Value: seconds since 1970.",
    "quire:lora_adapters_in_host_memory": "Adapters in host memory.",
    "quire:lora_adapters_in_slots": "Adapters in device memory.",
    "quire:lora_adapters_waiting": "Adapters that requests wait for.",
    "quire:lora_adapters_loaded": "Adapters read from disk.",
    "quire:lora_adapters_evicted": "Adapters that left device memory for others.",
    "quire:kv_tier_blocks": "KV blocks that a tier beside the device holds.",
    "quire:kv_tier_usage_perc": "Used fraction of a tier, from 0 to 1.",
    "quire:kv_tier_queries": "Tokens that a tier was asked for.",
    "quire:kv_tier_hits": "Tokens that were loaded from a tier.",
    "quire:kv_tier_restored_tokens": "Of these, tokens of requests that had been preempted.",
    "quire:kv_tier_evicted_blocks": "KV blocks that left a tier for others.",
    "quire:kv_tier_waits": "KV blocks that were overwritten while they were being saved: a step had to wait.",
    "quire:kv_tier_dropped_blocks": "KV blocks that were not saved, by reason.",
    "quire:kv_tier_errors": "Calls of a store that failed, by operation.",
    "quire:kv_tier_latency_seconds": "Seconds that the last calls of a store took, by operation and quantile.",
    "quire:kv_tier_copied_blocks": "KV blocks copied to and from a tier.",
    "quire:kv_tier_copied_bytes": "Bytes copied to and from a tier.",
    "quire:kv_tier_copy_seconds": "Seconds that these copies took, beside steps or in them.",
    "quire:iteration_tokens_total": "Tokens per engine step.",
    "quire:prompt_tokens": "Prompt tokens of requests that got their first token or pooled vector.",
    "quire:prompt_tokens_cached": "Prompt tokens served from the prefix cache.",
    "quire:prompt_tokens_by_source": "Prompt tokens that were computed, and those from the cache.",
    "quire:prompt_tokens_cached_by_source": "Prompt tokens found at admission, in the KV cache or by connectors.",
    "quire:generation_tokens": "Tokens generated.",
    "quire:corrupted_requests": "Requests that failed because their logits were not numbers.",
    "quire:request_success": "Finished completions, by reason.",
    "quire:time_to_first_token_seconds": "From arrival to the first token.",
    "quire:inter_token_latency_seconds": "Between one output of a completion and the next.",
    "quire:request_time_per_output_token_seconds": "A request's mean time per token after the first.",
    "quire:e2e_request_latency_seconds": "From arrival to the end.",
    "quire:request_queue_time_seconds": "From arrival until the request is first scheduled.",
    "quire:request_prefill_time_seconds": "From first scheduled to the first token.",
    "quire:request_decode_time_seconds": "From the first token to the last.",
    "quire:request_inference_time_seconds": "From first scheduled to the last token.",
    "quire:request_prompt_tokens": "Prompt tokens of a request.",
    "quire:request_prefill_kv_computed_tokens": "Prompt tokens of a request that were not cached.",
    "quire:request_generation_tokens": "Generated tokens of a request.",
    "quire:request_max_num_generation_tokens": "Tokens of a request's longest completion.",
    "quire:request_params_max_tokens": "The parameter max_tokens, if given.",
    "quire:request_params_n": "The parameter n.",
    "quire:request_num_preemptions": "How often a request was preempted.",
    "quire:cache_config_info": "Configuration of the KV cache as labels; the value is always 1.",
}
