"""Requests of many completions, and requests whose output fails."""

import numpy as np
import pytest

from quire.engine.output_processor import OutputProcessor
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, ErrorKind, FinishReason, PromptLogprobs
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import TokenPieces

PROMPT = [1, 2, 3]


class Panic(BaseException):
    """What a Rust library raises."""


class Faulty:
    """A tokenizer that cannot decode token 13."""

    drops_first_space = False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def pieces(self, skip_special_tokens: bool, visible: frozenset[int]) -> TokenPieces | None:
        return None

    def decode(self, token_ids: list[int], **_: object) -> str:
        if 13 in token_ids:
            raise self.error
        return "".join(chr(97 + token % 26) for token in token_ids)

    def token_text(self, token: int) -> str:
        return self.decode([token])


def add(processor: OutputProcessor, name: str, index: int, **params: object) -> None:
    given = SamplingParams(**{"output_kind": RequestOutputKind.DELTA, **params})  # type: ignore[arg-type]
    request = EngineCoreRequest(f"core-{name}", index, np.array(PROMPT, np.int32), given, (), 0, 0.0)
    processor.add(name, None, PROMPT, request)


def step(tokens: dict[int, int], finish: FinishReason = FinishReason.NONE) -> EngineCoreOutputs:
    count = len(tokens)
    return EngineCoreOutputs(
        index=np.array(list(tokens)),
        token_ids=np.array(list(tokens.values()), np.int32),
        offsets=np.arange(count + 1, dtype=np.int32),
        finish=np.full(count, finish, np.int8),
        num_cached=np.zeros(count, np.int32),
    )


class Counting(dict):
    """Counts the entries read."""

    looks = 0

    def __iter__(self):
        for key in super().__iter__():
            self.looks += 1
            yield key

    def items(self):
        self.looks += len(self)
        return super().items()

    def values(self):
        self.looks += len(self)
        return super().values()


def test_leaving_costs_what_the_request_itself_is() -> None:
    processor = OutputProcessor(None)
    processor._running = Counting()
    for i in range(50):
        add(processor, str(i), 100 * i, n=100)
    assert processor.num_sequences == 5000 and len(processor) == 50
    processor.process(step({700: 5, 703: 5}, FinishReason.LENGTH))
    left = processor.drop(["7", "unknown"])
    assert len(left) == 98 and left[:3] == ["core-7\0001", "core-7\0002", "core-7\0004"]
    assert processor.num_sequences == 4900 and processor._running.looks == 0
    assert not processor.drop(["7"])


@pytest.mark.parametrize("error", [ValueError("no such token"), Panic("a panic")])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_a_token_that_cannot_be_written_fails_its_request_alone(
    error: BaseException, kind: RequestOutputKind, caplog: pytest.LogCaptureFixture
) -> None:
    processor = OutputProcessor(Faulty(error))  # type: ignore[arg-type]
    for i, name in enumerate("abc"):
        add(processor, name, 10 * i, n=2, output_kind=kind, stop=["zzz"])
    ready, ended = processor.process(step({0: 1, 10: 13, 20: 1}))
    wrong = [output for output in ready if output.error is not None]
    assert [output.request_id for output in wrong] == ["b"] and ended == ["core-b", "core-b\0001"]
    assert wrong[0].finished and wrong[0].error_kind == ErrorKind.INTERNAL
    assert {choice.finish_reason for choice in wrong[0].outputs} == {"error"}
    assert "request b failed" in caplog.text and "test_output_processor" in caplog.text  # with its traceback
    ready, ended = processor.process(step({0: 1, 1: 1, 10: 1, 20: 1, 21: 1}, FinishReason.LENGTH))
    assert {output.request_id for output in ready if output.finished} == {"a", "c"} and not ended
    assert not processor.num_sequences and not len(processor)


def test_an_interrupt_fails_no_request() -> None:
    processor = OutputProcessor(Faulty(KeyboardInterrupt()))  # type: ignore[arg-type]
    add(processor, "a", 0, stop=["zzz"])
    with pytest.raises(KeyboardInterrupt):
        processor.process(step({0: 13}))


def test_logprobs_that_were_not_requested_fail_the_request() -> None:
    processor = OutputProcessor(None)
    add(processor, "a", 0)
    add(processor, "b", 1, prompt_logprobs=0)
    outputs = step({1: 5})
    one = np.ones((1, 1))
    outputs.prompt_logprobs = [PromptLogprobs(owner, 1, one, one, np.ones(1)) for owner in (0, 1)]
    ready, ended = processor.process(outputs)
    assert [(output.request_id, output.error_kind) for output in ready] == [("a", ErrorKind.INTERNAL), ("b", None)]
    assert ended == ["core-a"]
