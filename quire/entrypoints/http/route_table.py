"""Every route of vLLM 0.32's server: served here, served with a flag, or of a feature that is not available yet."""

from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.entrypoints.http.errors import INVALID, SERVER, ApiError

GET, POST = ("GET",), ("POST",)

WORKS: dict[str, tuple[str, ...]] = {
    "/docs": GET,
    "/get_world_size": GET,
    "/health": GET,
    "/kv_event_sources": GET,
    "/load": GET,
    "/ping": GET + POST,
    "/ready": GET,
    "/readyz": GET,
    "/v1/models": GET,
    "/v1/responses/{response_id}": GET,
    "/version": GET,
    "/detokenize": POST,
    "/inference/v1/generate": POST,
    "/invocations": POST,
    "/tokenize": POST,
    "/v1/chat/completions": POST,
    "/v1/chat/completions/batch": POST,
    "/v1/chat/completions/derender": POST,
    "/v1/chat/completions/render": POST,
    "/v1/completions": POST,
    "/v1/completions/derender": POST,
    "/v1/completions/render": POST,
    "/v1/messages": POST,
    "/v1/messages/count_tokens": POST,
    "/v1/messages/render": POST,
    "/v1/responses": POST,
    "/v1/responses/render": POST,
    "/v1/responses/{response_id}/cancel": POST,
    "/classify": POST,
    "/pooling": POST,
    "/rerank": POST,
    "/score": POST,
    "/v1/embeddings": POST,
    "/v1/rerank": POST,
    "/v1/score": POST,
    "/v2/embed": POST,
    "/v2/rerank": POST,
}
WITH_FLAG: dict[str, tuple[tuple[str, ...], str]] = {
    "/server_info": (GET, "--enable-admin"),
    "/v1/load_lora_adapter": (POST, "--allow-runtime-lora-updating"),
    "/v1/unload_lora_adapter": (POST, "--allow-runtime-lora-updating"),
    "/abort_requests": (POST, "--enable-admin"),
    "/reset_prefix_cache": (POST, "--enable-admin"),
    "/start_profile": (POST, "--profiler-config"),
    "/stop_profile": (POST, "--profiler-config"),
    "/tokenizer_info": (GET, "--enable-tokenizer-info-endpoint"),
}
NOT_YET: dict[str, tuple[tuple[str, ...], str]] = {
    "/fault_tolerance/status": (GET, "fault tolerance"),
    "/is_paused": (GET, "pausing generation"),
    "/is_sleeping": (GET, "sleep mode"),
    "/weight_info": (GET, "weight updates"),
    "/cohere/v2/chat": (POST, "the Cohere API"),
    "/cohere/v2/chat/render": (POST, "the Cohere API"),
    "/collective_rpc": (POST, "calls to workers over HTTP"),
    "/fault_tolerance/apply": (POST, "fault tolerance"),
    "/finish_weight_update": (POST, "weight updates"),
    "/generative_scoring": (POST, "scoring with generative models"),
    "/init_weight_transfer_engine": (POST, "weight updates"),
    "/is_scaling_elastic_ep": (POST, "elastic expert parallelism"),
    "/pause": (POST, "pausing generation"),
    "/release_kv_cache_memory": (POST, "sleep mode"),
    "/reset_encoder_cache": (POST, "multimodal input"),
    "/reset_mm_cache": (POST, "multimodal input"),
    "/resume": (POST, "pausing generation"),
    "/scale_elastic_ep": (POST, "elastic expert parallelism"),
    "/shutdown_weight_transfer_engine": (POST, "weight updates"),
    "/sleep": (POST, "sleep mode"),
    "/start_draft_weight_update": (POST, "weight updates"),
    "/start_weight_update": (POST, "weight updates"),
    "/update_weight_version": (POST, "weight updates"),
    "/update_weights": (POST, "weight updates"),
    "/v1/audio/transcriptions": (POST, "transcription models"),
    "/v1/audio/translations": (POST, "transcription models"),
    "/v1/realtime": (GET, "realtime sessions"),
    "/v1/systemone": (POST, "the SystemOne API"),
    "/wake_up": (POST, "sleep mode"),
    "/weight_checker": (POST, "weight updates"),
}
# OpenAI's package sends again whatever gets a 5xx, unless told otherwise.
NO_RETRY = {"x-should-retry": "false"}


def unserved(served: Collection[str]) -> list[Route]:
    """Routes that say why they are not served, for those of vLLM that are not among `served`."""
    later = [_refusing(path, methods, 501, f"not available yet: {what}") for path, (methods, what) in NOT_YET.items()]
    off = [_refusing(path, methods, 404, f"served with {flag}") for path, (methods, flag) in WITH_FLAG.items()]
    return [route for route in (*later, *off) if route.path not in served]


def _refusing(path: str, methods: tuple[str, ...], status: int, why: str) -> Route:
    async def refuse(request: Request) -> Response:
        kind, code = (SERVER, "not_available") if status == 501 else (INVALID, "not_found")
        raise ApiError(status, f"{request.method} {path}: {why}", type=kind, code=code, headers=NO_RETRY)

    return Route(path, refuse, methods=list(methods), include_in_schema=False)
