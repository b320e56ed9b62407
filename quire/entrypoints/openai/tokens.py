"""POST /inference/v1/generate: token ids in, token ids out, for front ends that tokenize themselves. With output_mode
"text" the text comes too."""

from collections.abc import Sequence
from typing import Any

from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.http.errors import bad_request, not_available
from quire.entrypoints.openai.endpoint import Answer, GenerationEndpoint
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat, prompt_logprobs
from quire.entrypoints.openai.params import check_named_tokens
from quire.entrypoints.openai.protocol import GenerationRequest, TokensRequest
from quire.entrypoints.openai.response import ResponseBuilder, ResponseOptions, encode
from quire.messages.sampling_params import ALL_LOGPROBS, ReasoningTokens, RequestOutputKind, SamplingParams


class TokensEndpoint(GenerationEndpoint[TokensRequest]):
    request_type = TokensRequest
    id_prefix = "generate-tokens-"
    prompt_field = "token_ids"

    def params(self, request: TokensRequest) -> SamplingParams:
        for name in ("features", "content_parts"):
            if getattr(request, name):
                raise not_available(name, "multimodal input")
        if request.output_mode not in (None, "tokens", "text"):
            raise bad_request(f"output_mode is {shown(request.output_mode)}; allowed: tokens, text", "output_mode")
        given = {"max_tokens": None} | request.sampling_params  # None: what the prompt leaves of the model's length
        unknown = given.keys() - set(SamplingParams.__struct_fields__)
        if unknown:
            raise bad_request(f"sampling_params has unknown fields: {', '.join(sorted(unknown))}", "sampling_params")
        if given.get("stop") and given.get("detokenize") is False:
            raise bad_request("stop needs text; leave out detokenize, or give stop_token_ids", "sampling_params")
        if request.output_mode == "text":
            _ = self.context.tokenizer  # refuses on a server without one
            if given.get("detokenize") is False:
                raise bad_request("output_mode text needs detokenize; leave it out", "output_mode")
        check_named_tokens(given)
        if given.get("prompt_logprob_token_ids") is not None:
            message = "prompt_logprob_token_ids is not for responses over HTTP; give prompt_logprobs"
            raise bad_request(message, "sampling_params")
        given["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        try:
            if isinstance(given.get("reasoning"), dict):
                given["reasoning"] = ReasoningTokens(**given["reasoning"])
            params = SamplingParams(**given)
        except (TypeError, ValueError) as error:
            raise refused_value(ValueError(str(error)), (), "sampling_params") from None
        self.builder.check_limits(params.n, len(params.stop))
        return params

    def sources(self, request: TokensRequest) -> Sequence[Any]:
        if not request.token_ids:
            raise bad_request("token_ids is empty; give at least one", "token_ids")
        return [request.token_ids]

    def prompts(self, request: TokensRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        self.check_length(request.sampling_params.get("truncate_prompt_tokens") is not None, len(sources[0]))
        return [ParsedPrompt(None, sources[0])]

    def response(self, id: str, model: str, request: TokensRequest, logprobs: LogprobFormat) -> Answer:
        return TokensResponse(id.removeprefix(self.id_prefix), model, self.options, request, logprobs)


class TokensResponse(ResponseBuilder):
    object = chunk_object = "tokens"
    text_suffix = b""

    def __init__(
        self, id: str, model: str, options: ResponseOptions, request: TokensRequest, logprobs: LogprobFormat
    ) -> None:
        given = request.sampling_params
        self.with_text = request.output_mode == "text"
        self.with_prompt_ids = bool(request.return_token_ids)
        self.text_prefix, self.no_text = (b',"text":', b',"text":""') if self.with_text else (b"", b"")
        self.num_logprobs: int | None = given.get("logprobs")
        self.named = bool(given.get("logprob_token_ids"))
        common = GenerationRequest(
            n=given.get("n"),
            stream_options=request.stream_options,
            prompt_logprobs=given.get("prompt_logprobs"),
            return_token_ids=True,
        )
        super().__init__(id, model, options, common, logprobs)
        self._mode = {"output_mode": "text" if self.with_text else "tokens"}
        self._head = b"data: " + encode({"request_id": id, **self._mode})[:-1]

    @property
    def with_logprobs(self) -> bool:
        return self.num_logprobs is not None

    def text(self, text: str) -> bytes:
        return super().text(text) if self.with_text else b""

    def first_events(self, choice: int, prompt_index: int, output: RequestOutput) -> list[bytes]:
        fields = b""
        if self.with_prompt_ids:
            fields += b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        if self.with_prompt_logprobs:
            fields += b',"prompt_logprobs":' + encode(prompt_logprobs(output.prompt_logprobs))
        if choice != 0 or not fields:
            return []
        return [self.event(choice, self.no_text, choice_fields=b',"token_ids":[]', event_fields=fields)]

    def choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        return {
            "index": index,
            **({"text": completion.text} if self.with_text else {}),
            "logprobs": self.logprobs(index, completion) if self.with_logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
        }

    def logprobs(self, choice: int, completion: CompletionOutput) -> dict[str, Any]:
        num_top = ALL_LOGPROBS if self.named else self.num_logprobs or 1  # at least the sampled token
        format = self.logprob_format.chat if self.with_text else self.logprob_format.tokens
        return {"content": format(completion.token_ids, completion.logprobs or [], num_top)}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        shape = super().whole(outputs)
        names = ("model", "created", "choices", "usage", "kv_transfer_params", "ec_transfer_params", "metrics")
        return {
            "request_id": shape["id"],
            **self._mode,
            **{name: shape[name] for name in names},
            "prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs),
            "prompt_token_ids": outputs[0].prompt_token_ids if self.with_prompt_ids else None,
        }
