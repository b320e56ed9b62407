"""Chat responses whose text is parsed: reasoning and tool calls beside the content."""

from typing import Any

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.openai.chat_response import ChatResponse
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.output_parsing import OutputParsing
from quire.entrypoints.openai.output_reader import OutputReader
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.response import ResponseOptions, encode
from quire.entrypoints.parsers.base import ParsedDelta, ToolCallDelta


class ParsedChatResponse(ChatResponse):
    def __init__(
        self,
        id: str,
        model: str,
        options: ResponseOptions,
        request: ChatRequest,
        logprobs: LogprobFormat,
        role: str,
        parsing: OutputParsing,
    ) -> None:
        super().__init__(id, model, options, request, logprobs, role)
        self._text_only = False
        self.parsing = parsing
        self.with_reasoning = request.include_reasoning is not False
        self._readers: dict[int, OutputReader] = {}
        self._choices_with_calls: set[int] = set()

    def first_events(self, choice: int, prompt_index: int, output: RequestOutput) -> list[bytes]:
        self._begin(choice, output)
        return super().first_events(choice, prompt_index, output)

    def _begin(self, choice: int, output: RequestOutput) -> OutputReader:
        reader = self._readers[choice] = OutputReader(self.parsing, output.prompt or "")
        return reader

    # Streams

    def _full_event(self, index: int, completion: CompletionOutput) -> bytes:
        self._count(index, completion)
        reader, finish_reason = self._readers[index], completion.finish_reason
        deltas = self._deltas(index, reader.read(completion))
        if finish_reason is not None:
            deltas += self._deltas(index, reader.finish())
        if not deltas and (self.with_logprobs or self.with_token_ids or finish_reason is not None):
            deltas = [{}]  # send token ids and logprobs now, even if the text is held back
        events = []
        for i, delta in enumerate(deltas):
            logprobs, finish, fields = b"null", b"null", b""
            if i == 0:
                logprobs, fields = self.encoded_logprobs(index, completion), self.token_fields(completion, index)
            if i == len(deltas) - 1 and finish_reason is not None:
                finish = encode(self._finish_reason(index, finish_reason))
                fields += self.stop_fields(completion)
            events.append(self.event(index, _delta(delta), logprobs, finish, fields))
        return b"".join(events)

    def last_event(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        held = self._deltas(index, self._readers[index].finish())
        events = [self.event(index, _delta(delta)) for delta in held]
        events.append(super().last_event(index, self._finish_reason(index, finish_reason), stop_reason))
        return b"".join(events)

    def _deltas(self, index: int, found: ParsedDelta) -> list[dict[str, Any]]:
        """One delta per field: many clients read only one field of a delta."""
        deltas: list[dict[str, Any]] = []
        if found.reasoning and self.with_reasoning:
            deltas.append({"reasoning": found.reasoning, "reasoning_content": found.reasoning})
        if found.content:
            deltas.append({"content": found.content})
        for call in found.tool_calls:
            self._choices_with_calls.add(index)
            deltas.append({"tool_calls": [_call_delta(call)]})
        return deltas

    # Whole responses

    def choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        reader = self._begin(index, output)
        self._count(index, completion)
        fed, held = reader.read(completion), reader.finish()
        calls = _whole_calls([*fed.tool_calls, *held.tool_calls])
        if calls:
            self._choices_with_calls.add(index)
        content: str | None = self.echoed + fed.content + held.content
        reasoning: str | None = fed.reasoning + held.reasoning if self.with_reasoning else None
        # As in vLLM: null beside calls that the model decided on, empty beside those that the request demanded.
        if not content and (calls or fed.reasoning or held.reasoning):
            content = "" if self.parsing.forces_calls else None
        shape = super().choice(index, prompt_index, output, completion)
        message = self.message(content, reasoning or None)
        if self.parsing.reasoning is not None or reasoning:
            message["reasoning_content"] = reasoning or None
        shape["message"] = message | ({"tool_calls": calls} if calls else {})
        shape["finish_reason"] = self._finish_reason(index, completion.finish_reason)
        return shape

    # Both

    def _finish_reason(self, index: int, reason: Any) -> Any:
        # OpenAI keeps "stop" where the request named the function.
        named = isinstance(self.request.tool_choice, dict)
        return "tool_calls" if reason == "stop" and index in self._choices_with_calls and not named else reason

    def _count(self, index: int, completion: CompletionOutput) -> None:
        reader = self._readers[index]
        if reader.counts:
            self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + reader.reasoning_tokens(completion)


def _delta(shape: dict[str, Any]) -> bytes:
    return b',"delta":' + encode(shape)


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(deltas: list[ToolCallDelta]) -> list[dict[str, Any]]:
    calls: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": "".join(arguments[index])},
        }
        for index, call in sorted(calls.items())
    ]
