"""Stop conditions found by the front end: stop strings and repetition."""

from quire.messages.sampling_params import RepetitionDetection


class StopStrings:
    """Finds the stop string that is completed first, independent of how tokens split the text."""

    def __init__(self, stops: list[str], include: bool) -> None:
        self.stops = stops
        self.include = include

    def find(self, text: str, searched: int) -> tuple[str, int] | None:
        """The stop that ends first after `searched` characters, and where to cut the text."""
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        return stop, end if self.include else start

    def held_back(self, text: str) -> int:
        """The length of the text's longest suffix that may begin a stop string and is not sent yet."""
        most = 0
        for stop in self.stops:
            for count in range(min(len(stop) - 1, len(text)), most, -1):
                if stop[count - 1] == text[-1] and text.endswith(stop[:count]):
                    most = count
                    break
        return most


def has_repetition(token_ids: list[int], detection: RepetitionDetection) -> bool:
    """Whether the tokens end in one pattern, `min_count` times in a row."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > len(token_ids):
            return False
        # A sequence repeats with period `size` exactly if it equals itself shifted by that.
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-span:-size] == token_ids[-span + size :]:
            return True
    return False
