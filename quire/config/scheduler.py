"""Options of the scheduler."""

from dataclasses import dataclass

from quire.config.fields import internal, option, validate


@dataclass
class SchedulerConfig:
    """What runs in a step."""

    max_num_batched_tokens: int | None = option(None, "most tokens in one step; default by platform", minimum=1)
    max_num_scheduled_tokens: int | None = option(
        None, "most of these that are scheduled, if fewer; what a step could hold stays reserved", minimum=1
    )
    # A step admits no further request once it has this many tokens, while few requests wait: results come sooner, and
    # fewer at the same moment. 0: it admits as many as it holds.
    short_step_tokens: int = internal(0)
    max_num_seqs: int | None = option(None, "most requests in one step; default by platform", minimum=1)
    scheduling_policy: str = option(
        "fcfs", "order of requests: first come, or lowest priority value", choices=("fcfs", "priority")
    )
    enable_chunked_prefill: bool = option(True, "split prompts that exceed the step's token budget")
    long_prefill_token_threshold: int = option(
        0, "longest piece of a prompt in one step; 0: only the token budget limits it", minimum=0
    )
    stream_interval: int = option(
        1, "tokens between two parts of a stream; the first and the last come at once", minimum=1
    )
    max_num_queued_reqs: int | None = option(
        None, "for a server: most requests at a time, waiting or running, beyond it 503; n counts", minimum=1
    )
    max_num_queued_tokens: int | None = option(
        None, "for a server: respond with 503 when prompts of this many tokens wait, in each API process", minimum=0
    )
    async_scheduling: bool = option(True, "plan the next step while the device runs this one")
    async_depth: int = option(1, "steps planned ahead with async scheduling", minimum=1, maximum=8)
    encoder_cache_size: int | None = option(
        None,
        "most tokens that outputs of a model's encoders hold; default: as many as a step has, but 8192 or more",
        minimum=1,
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def encoder_tokens(self) -> int:
        """Of the encoder cache, once the platform's defaults are known."""
        return self.encoder_cache_size or max(self.max_num_batched_tokens or 0, 8192)

    @property
    def depth(self) -> int:
        return self.async_depth if self.async_scheduling else 0
