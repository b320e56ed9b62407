"""A request over gRPC, as one for tokens; and its outputs as messages."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.grpc import engine_pb2 as pb
from quire.entrypoints.http.errors import ApiError, bad_request
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai.endpoint import Answer
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.protocol import TokensRequest
from quire.entrypoints.openai.response import Usage
from quire.entrypoints.openai.tokens import TokensEndpoint

STRUCTURED = ("json", "regex", "grammar")


class GrpcRequest(TokensRequest, kw_only=True):
    text: str | None = None  # instead of token ids


class GrpcEndpoint(TokensEndpoint):
    """Limits, admission, parameters and prompts are those of requests over HTTP."""

    id_prefix = "grpc-"

    def decoded(self, data: bytes) -> GrpcRequest:
        try:
            message = pb.GenerateRequest.FromString(data)
        except DecodeError:
            raise bad_request("the message is not a GenerateRequest of engine.proto") from None
        kind = message.WhichOneof("input")
        if kind is None:
            raise bad_request("the request has no input; give text or token_ids", "input")
        self.check_length(False, len(message.token_ids.ids))  # before they are copied
        return GrpcRequest(
            request_id=message.request_id or None,
            model=message.model or None,
            token_ids=list(message.token_ids.ids),
            text=message.text if kind == "text" else None,
            sampling_params=self._sampling(message.sampling_params),
            stream=message.stream,
            priority=message.priority,
            cache_salt=message.cache_salt or None,
        )

    def _sampling(self, message: Any) -> dict[str, Any]:
        """The fields that are set, with the names of SamplingParams."""
        given: dict[str, Any] = {}
        for field, value in message.ListFields():
            if field.name == "choice":
                given["structured_outputs"] = {"choice": self._values("choice", value.texts)}
            elif field.name in STRUCTURED:
                given["structured_outputs"] = {field.name: value}
            elif field.name == "logit_bias":
                self._values(field.name, value)
                given[field.name] = dict(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                given[field.name] = self._values(field.name, value)
            else:
                given[field.name] = value
        return given

    def _values(self, name: str, values: Collection[Any]) -> list[Any]:
        most = self.context.bodies.decoder.limits.values
        if len(values) > most:
            raise bad_request(f"{name} has more than {most} values (--max-request-values)", name, "request_too_large")
        return list(values)

    def sources(self, request: TokensRequest) -> Sequence[Any]:
        assert isinstance(request, GrpcRequest)
        return super().sources(request) if request.text is None else [request.text]

    def prompts(self, request: TokensRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        assert isinstance(request, GrpcRequest)
        if request.text is None:
            return super().prompts(request, sources, size)
        self.context.check_chars(len(request.text), "text")
        try:
            ids = self.context.tokenizer.encode(request.text)
        except ValueError as error:
            raise refused_value(error, (), "text") from None
        self.check_length(False, len(ids))
        return [ParsedPrompt(request.text, ids)]

    def response(self, id: str, model: str, request: TokensRequest, logprobs: LogprobFormat) -> Answer:
        return MessagesOf(bool(request.stream))


class MessagesOf:
    """Outputs as messages. What an answer has for HTTP is not called."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream
        self.usage = Usage()
        self._counts: dict[int, int] = {}

    def messages(self, output: RequestOutput) -> Iterator[Any]:
        self.usage.prompt_tokens = len(output.prompt_token_ids)
        for completion in output.outputs:
            new = len(completion.token_ids)
            self.usage.completion_tokens += new
            self._counts[completion.index] = self._counts.get(completion.index, 0) + new
            if self.stream and (completion.text or completion.token_ids):
                yield pb.GenerateResponse(chunk=pb.GenerateChunk(**_new(completion)))
            if completion.finish_reason is not None:
                yield pb.GenerateResponse(complete=self._complete(output, completion))

    def _complete(self, output: RequestOutput, completion: CompletionOutput) -> Any:
        fields: dict[str, Any] = {"index": completion.index} if self.stream else _new(completion)
        reason = completion.stop_reason
        if isinstance(reason, str):
            fields["stop_text"] = reason
        elif reason is not None:
            fields["stop_token_id"] = reason
        return pb.GenerateComplete(
            **fields,
            finish_reason=str(completion.finish_reason),
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            completion_tokens=self._counts[completion.index],
        )

    @property
    def keep_alive(self) -> bytes:
        return b""

    def events(self, batch: Batch) -> bytes:
        raise NotImplementedError

    def end(self) -> bytes:
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        raise NotImplementedError

    def body(self, outputs: list[RequestOutput]) -> bytes:
        raise NotImplementedError


def _new(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = []
    for token, entry in zip(completion.token_ids, completion.logprobs or (), strict=False):
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        ordered = [(token, entry[token]), *((id, found) for id, found in best if id != token)]
        entries = [pb.Logprob(token_id=id, logprob=found.logprob, rank=found.rank or 0) for id, found in ordered]
        logprobs.append(pb.TokenLogprobs(entries=entries))
    fields = {"index": completion.index, "text": completion.text, "token_ids": completion.token_ids}
    return fields | {"logprobs": logprobs}
