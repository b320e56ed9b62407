"""One completion of a request: its tokens and text so far, and the stop conditions checked by the front end."""

from dataclasses import dataclass, field

from quire.engine.logprobs import FlatLogprobs, SampleLogprobs
from quire.engine.outputs import CompletionOutput
from quire.messages.requests import FinishReason
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.metrics.spec_decode import SpecDecodeMetrics
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.stops import StopStrings, has_repetition


@dataclass(slots=True)
class Completion:
    core_id: str
    index: int
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_decoded: int = 0  # tokens whose text is in `text`
    num_hidden: int = 0  # last tokens left out of the text: the stop token
    tokens_sent: int = 0
    text_sent: int = 0
    last_token_at: float = 0.0  # monotonic clock
    num_resumed: int = 0  # leading tokens that were generated elsewhere
    drafts: SpecDecodeMetrics | None = None

    def __post_init__(self) -> None:
        if self.params.stop:
            self.stops = StopStrings(self.params.stop, self.params.include_stop_str_in_output)
        if self.params.num_logprobs is not None:
            self.logprobs, self.cumulative_logprob = FlatLogprobs() if self.params.flat_logprobs else [], 0.0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_resumed

    def is_due(self, interval: int) -> bool:
        """Whether a stream that gets `interval` tokens at a time should get those that it has not got."""
        new = len(self.token_ids) - self.tokens_sent
        return new >= interval or self.tokens_sent == self.num_resumed or self.finish_reason is not None

    def resume(self, token_ids: list[int]) -> None:
        """Go on after these: their text was sent by whoever generated them, and they have no logprobs."""
        self.token_ids += token_ids
        self.num_resumed = len(token_ids)
        self.output()

    def add_tokens(self, token_ids: list[int]) -> None:
        """Append tokens up to the first that meets a stop condition; later ones are dropped."""
        if self.stops is None and self.params.repetition_detection is None:
            self.token_ids += token_ids
            return
        for token in token_ids:
            self.token_ids.append(token)
            if self._should_stop():
                return

    def finish(self, reason: str, stop_reason: int | None) -> None:
        """Finished by the core; a stop condition found here in the same tokens has precedence."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
            by_token = reason == str(FinishReason.STOP) and not self.params.include_stop_str_in_output
            self.num_hidden = int(by_token)

    def output(self) -> CompletionOutput:
        """The new part, or everything so far, depending on output_kind."""
        self._decode()
        visible = len(self.text)
        if self.stops is not None and self.finish_reason is None:
            visible -= self.stops.held_back(self.text)
        delta = self.params.output_kind == RequestOutputKind.DELTA
        first_token, first_char = (self.tokens_sent, self.text_sent) if delta else (0, 0)
        self.tokens_sent, self.text_sent = len(self.token_ids), max(visible, self.text_sent)
        output = CompletionOutput(
            self.index,
            self.text[first_char:visible],
            self.token_ids[first_token:],
            self.cumulative_logprob,
            self.logprobs[max(0, first_token - self.num_resumed) :] if self.logprobs is not None else None,
            None,
            self.finish_reason,
            self.stop_reason,
        )
        if self.drafts is not None:
            output.spec_decode_metrics = self.drafts
        return output

    def _should_stop(self) -> bool:
        if self.stops is not None:
            searched = len(self.text)
            self._decode()
            found = None if len(self.token_ids) <= self.params.min_tokens else self.stops.find(self.text, searched)
            if found is not None:
                self.stop_reason, cut = found
                self.text = self.text[:cut]
                self.finish_reason = str(FinishReason.STOP)
                return True
        detection = self.params.repetition_detection
        if (
            detection is not None
            and len(self.token_ids) > self.params.min_tokens
            and has_repetition(self.token_ids, detection)
        ):
            self.finish_reason = str(FinishReason.REPETITION)
            return True
        return False

    def _decode(self) -> None:
        """Called only when the text is needed: a FINAL_ONLY completion is decoded at once."""
        if self.detokenizer is None or self.stop_reason in self.params.stop:
            return
        shown = len(self.token_ids) - self.num_hidden
        self.text += self.detokenizer.add(self.token_ids[self.num_decoded : shown])
        self.num_decoded = shown
        if self.finish_reason is not None:
            self.text += self.detokenizer.flush()
