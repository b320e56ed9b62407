"""Times of a request."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestMetrics:
    """Wall-clock times, derived from the monotonic clock, so that differences are right even if the wall clock was
    set."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None  # known at the end
    finished_time: float | None = None
    num_generation_tokens: int = 0  # of all completions, known at the end
    num_preemptions: int = 0  # of all completions

    @property
    def queued_ts(self) -> float:
        """This and what follows: vLLM's names."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        return self.time_to_first_token or 0.0

    @property
    def is_corrupted(self) -> bool:
        """Such a request ends with an error."""
        return False

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)

    @property
    def time_in_queue(self) -> float | None:
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_in_prefill(self) -> float | None:
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def time_in_decode(self) -> float | None:
        return _between(self.first_token_time, self.last_token_time)

    @property
    def time_in_inference(self) -> float | None:
        return _between(self.first_scheduled_time, self.last_token_time)


def _between(start: float | None, end: float | None) -> float | None:
    # The conversion between clocks may round to a negative difference.
    return None if start is None or end is None else max(0.0, end - start)
