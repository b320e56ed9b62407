"""Options of the HTTP server, separate from EngineConfig because an engine does not need them."""

import argparse
import dataclasses
import logging
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.environment import QUIRE_API_KEY, VLLM_API_KEY, option_defaults
from quire.config.fields import option, options, require_object, validate
from quire.config.flags import add_flag

logger = logging.getLogger("quire")

REASONING_KEYS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")
UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass
class ServerConfig:
    """The HTTP server."""

    uds: str | None = option(None, "Unix domain socket to listen on, instead of host and port")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of them")
    port: int = option(8000, "port to listen on; 0: a free one", minimum=0, maximum=65535)
    grpc_port: int | None = option(
        None, "port of a gRPC server beside HTTP (extra: grpc); 0: a free one; default: none", minimum=0, maximum=65535
    )
    headless: bool = option(False, "no server, workers only: on machines of --nnodes but the first")
    api_server_count: int = option(1, "API server processes for one engine", minimum=1, maximum=64)
    served_model_name: tuple[str, ...] = option(
        (), "names of the model in requests, the first also in responses", several="many"
    )
    skip_model_name_validation: bool = option(False, "serve requests that name any model")
    lora_modules: tuple[str, ...] = option(
        (), 'adapters that are served as models, as name=path or {"name": ..., "path": ...}', several="many"
    )
    lora_folder: str | None = option(None, "folder whose subfolders are adapters, served by their names")
    lora_allowed_paths: tuple[str, ...] = option(
        (), "folders that /v1/load_lora_adapter may load from; default: any", several="many"
    )
    allow_runtime_lora_updating: bool = option(
        False, "serve /v1/load_lora_adapter and /v1/unload_lora_adapter without --enable-admin"
    )
    root_path: str = option("", "path prefix under which a proxy serves it; paths without it are served too")

    api_key: tuple[str, ...] = option(
        (),
        f"keys, of which clients must send one; also from {QUIRE_API_KEY.name}, comma-separated",
        several="many",
    )
    api_key_file: str | None = option(None, "file with one key per line; lines that begin with # are ignored")
    open_paths: str = option(
        "/health,/ready,/readyz,/ping,/metrics,/version",
        "paths that need no key and have no rate limit, comma-separated",
    )
    disable_page: bool = option(False, "do not serve the page at /")
    open: bool = option(False, "open the page in a browser once the server listens")
    disable_fastapi_docs: bool = option(False, "do not serve the API's schema and documentation")
    renderer_num_workers: int = option(2, "threads that render and tokenize long prompts", minimum=1, maximum=64)
    tokens_only: bool = option(False, "serve token ids only, at /inference/v1/generate; no tokenizer is loaded")
    enable_admin: bool = option(
        False,
        "serve the page's live view and operators' routes: /reset_prefix_cache, /abort_requests, /server_info, those "
        "of pausing, sleep and new weights, /collective_rpc",
    )
    trust_request_chat_template: bool = option(False, "let a request bring its own chat_template")
    chat_template_content_format: str = option(
        "auto",
        "how templates get a message's content: a string, openai's list of parts, or as the template expects it",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "variables for the chat template, unless a request brings its own"
    )
    response_role: str = option("assistant", "role of responses")
    reasoning_parser: str | None = option(
        None, "format of the model's reasoning: qwen3, ..., none, or your own module:name; default: by chat template"
    )
    reasoning_parser_plugin: str | None = option(None, "file or module that registers reasoning parsers of your own")
    reasoning_config: dict[str, str] | None = option(
        None, "reasoning_start_str, reasoning_end_str: what begins reasoning, and ends it where a request's budget does"
    )
    enable_auto_tool_choice: bool = option(True, "let the model decide to call tools")
    tool_call_parser: str | None = option(
        None, "format of the model's calls: hermes, ..., none, or your own module:name; default: by chat template"
    )
    tool_parser_plugin: str | None = option(None, "file or module that registers tool parsers of your own")
    exclude_tools_when_tool_choice_none: bool = option(False, 'leave tools out of prompts with tool_choice "none"')
    strict_fields: bool = option(False, "reject unknown fields instead of warning once")
    prefix_cache_isolation: str | None = option(
        None,
        "who shares cached prefixes: key (requests of one API key), none (all); default: key if there are several",
        choices=("key", "none"),
    )

    error_format: str = option(
        "openai", "schema of errors: type and code as OpenAI or vLLM", choices=("openai", "vllm")
    )
    metrics_prefix: str = option("quire", "of the names in /metrics; vllm: for its dashboards")
    enable_force_include_usage: bool = option(False, "token counts in every event of a stream")
    enable_prompt_tokens_details: bool = option(False, "usage.prompt_tokens_details: how many tokens were cached")
    enable_per_request_metrics: bool = option(False, "a request's times in its response (metrics)")
    return_tokens_as_token_ids: bool = option(False, "tokens in logprobs as token_id:N, where a request does not say")
    fingerprint_mode: str = option(
        "full", "system_fingerprint in responses", choices=("full", "hash", "custom", "none")
    )
    fingerprint_value: str | None = option(None, "the fingerprint of --fingerprint-mode custom")
    sse_keep_alive_interval: float = option(
        0.0, "seconds without a token after which a stream gets a comment; 0: never", minimum=0
    )
    enable_tokenizer_info_endpoint: bool = option(False, "serve /tokenizer_info, which includes the chat template")

    max_request_bytes: int = option(32 << 20, "largest request body", minimum=1)
    max_request_bytes_in_all: int = option(1 << 30, "most bytes of request bodies being read at a time", minimum=1)
    max_request_values: int | None = option(
        None, "most numbers, texts, lists and objects in a body; default: 262144, or twice max_model_len", minimum=1
    )
    max_request_objects: int = option(1 << 16, "most lists and objects in a body", minimum=1)
    max_request_fields: int = option(512, "most fields of a body", minimum=1)
    max_prompt_chars: int | None = option(
        None, "longest text that is tokenized; default: what max_model_len tokens can hold", minimum=1
    )
    max_messages: int = option(8192, "most messages of a conversation", minimum=1)
    max_tools: int = option(128, "most tools of a request", minimum=1)
    max_waiting_requests: int | None = option(
        None, "respond with 503 when this many requests wait; default: no limit", minimum=0
    )
    request_timeout: float | None = option(None, "seconds after which a request fails with an error", minimum=0.001)
    max_prompts: int = option(1024, "most prompts in one completions request", minimum=1)
    max_inputs: int = option(2048, "most texts in one request for embeddings, scores or classes", minimum=1)
    max_n: int = option(128, "most choices per prompt (n)", minimum=1)
    max_logprob_entries: int | None = option(
        None,
        "most logprobs in one response, tokens times (logprobs + 1); default: 1048576, 16 times as many with "
        "--max-logprobs -1",
        minimum=1,
    )
    max_sequences: int = option(1024, "most sequences of one request: prompts times n", minimum=1)
    max_stop: int = option(64, "most stop strings of a request", minimum=0)

    max_stored_responses: int = option(
        1024, "responses of /v1/responses that are kept, the oldest of a key go first; 0: none", minimum=0
    )
    max_stored_response_bytes: int = option(256 << 20, "most bytes of them", minimum=0)
    stored_response_ttl: float = option(86400.0, "seconds for which they are kept", minimum=0)

    rate_limit_interval: float = option(60.0, "seconds over which rate limits count", minimum=0.001)
    rate_limit_requests: int | None = option(None, "requests per interval for a key, or an address", minimum=1)
    rate_limit_token: int | None = option(
        None, "prompt and output tokens per interval for a key, or an address", minimum=1
    )

    allowed_origins: tuple[str, ...] = option(
        (), "origin whose web pages may call the server (CORS); *: all", several="json"
    )
    allowed_methods: tuple[str, ...] = option((), "method they may use (default: GET and POST)", several="json")
    allowed_headers: tuple[str, ...] = option((), "header they may send (default: all)", several="json")
    allow_credentials: bool = option(False, "let web pages send cookies")

    otlp_traces_endpoint: str | None = option(None, "OpenTelemetry collector for a span per request (extra: otel)")
    access_log: bool = option(True, "a log line for each request")
    disable_uvicorn_access_log: bool = option(False, "the same as --no-access-log")
    uvicorn_log_level: str | None = option(
        None, "lowest level of the HTTP server's log lines, those for each request included", choices=UVICORN_LEVELS
    )
    enable_log_requests: bool = option(False, "log each request's parameters; its prompt at level DEBUG")
    enable_log_outputs: bool = option(False, "log responses too; needs --enable-log-requests")
    enable_log_deltas: bool = option(True, "with those, log each part of a stream")
    max_log_len: int | None = option(None, "most characters and token ids of a logged prompt or response", minimum=0)
    log_error_stack: bool = option(False, "log where each error response was raised")
    disable_access_log_for_endpoints: str | None = option(None, "paths without one, comma-separated: /health,/metrics")
    middleware: tuple[str, ...] = option((), "your own ASGI middleware as module:Class, or an async function")

    ssl_keyfile: str | None = option(None, "private key for TLS")
    ssl_certfile: str | None = option(None, "certificate for TLS")
    ssl_keyfile_password: str | None = option(None, "password of the private key")
    ssl_ca_certs: str | None = option(None, "certificates of authorities for clients' certificates")
    ssl_cert_reqs: int = option(0, "clients' certificates: 0 none, 1 optional, 2 required", minimum=0, maximum=2)
    ssl_ciphers: str | None = option(None, "ciphers of TLS 1.2, in OpenSSL's notation")
    enable_ssl_refresh: bool = option(False, "use new certificate files without a restart")
    timeout_keep_alive: int = option(5, "seconds after which an idle connection is closed", minimum=1)
    timeout_request_headers: float = option(30.0, "seconds in which a request's headers must arrive", minimum=0.001)
    timeout_request_body: float = option(60.0, "seconds in which its body must arrive", minimum=0.001)
    timeout_response_write: float = option(
        120.0, "seconds after which a client that does not read its response is disconnected", minimum=0.001
    )
    max_connections: int | None = option(
        None, "most open connections of a process; default: 8192, or 3/4 of its file descriptors", minimum=1
    )
    max_connections_per_address: int | None = option(
        None, "most of them from one address; default: 3/4 of all", minimum=1
    )
    h11_max_incomplete_event_size: int = option(1 << 16, "most bytes of a request's line and headers", minimum=1)
    h11_max_header_count: int = option(256, "most headers of a request", minimum=1)
    max_url_bytes: int = option(8192, "longest path and query", minimum=1)
    shutdown_timeout: float = option(30.0, "seconds that running requests have to end at shutdown", minimum=0)

    def __post_init__(self) -> None:
        validate(self)
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("TLS needs both --ssl-keyfile and --ssl-certfile")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.metrics_prefix, re.ASCII):
            raise ValueError(
                f"metrics_prefix is {self.metrics_prefix!r}; it must be letters, digits and _ (--metrics-prefix)"
            )
        if (self.fingerprint_mode == "custom") != (self.fingerprint_value is not None):
            raise ValueError("--fingerprint-mode custom and --fingerprint-value need each other")
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ValueError("--enable-log-outputs needs --enable-log-requests")
        if self.disable_uvicorn_access_log:
            self.access_log = False
        require_object("default_chat_template_kwargs", self.default_chat_template_kwargs)
        self._check_reasoning()
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path is {self.root_path!r}; it must begin with / (--root-path)")
        self.root_path = self.root_path.rstrip("/")

    def _check_reasoning(self) -> None:
        require_object("reasoning_config", self.reasoning_config)
        given = self.reasoning_config or {}
        wrong = [name for name, text in given.items() if name not in REASONING_KEYS or not isinstance(text, str)]
        if wrong:
            allowed = ", ".join(REASONING_KEYS)
            raise ValueError(f"reasoning_config has {', '.join(wrong)}; allowed, with texts as values: {allowed}")
        self.reasoning_parser = self.reasoning_parser or given.get("reasoning_parser") or None

    @property
    def unlogged_paths(self) -> frozenset[str]:
        return _paths(self.disable_access_log_for_endpoints or "")

    @property
    def unguarded_paths(self) -> frozenset[str]:
        return _paths(self.open_paths)


def _paths(listed: str) -> frozenset[str]:
    return frozenset(path.strip() for path in listed.split(",") if path.strip())


def add_server_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """A flag for every field, or `only` some; those that hold several values may be given several times."""
    group = parser.add_argument_group((ServerConfig.__doc__ or "").rstrip("."))
    types = typing.get_type_hints(ServerConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    for name, info in options(ServerConfig).items():
        if only is None or name in only:
            add_flag(group, name, info, types[name], defaults[name])


def server_config(args: argparse.Namespace, only: Collection[str] | None = None) -> ServerConfig:
    names = options(ServerConfig) if only is None else only
    given = option_defaults(names) | {name: getattr(args, name) for name in names if hasattr(args, name)}
    several = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return ServerConfig(**(given | several))


def load_api_keys(config: ServerConfig, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """All API keys; with none, the server is open. A configured source without a key is an error, since its user did
    not intend an open server."""
    keys = list(config.api_key)
    if any(not key.strip() for key in keys):
        raise ValueError("--api-key is empty; leave it out for a server without keys")
    if config.api_key_file is not None:
        file = Path(config.api_key_file).expanduser()
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        if file.stat().st_mode & 0o077:
            logger.warning("%s can be read by other users of this machine; chmod 600 it", config.api_key_file)
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ValueError(f"{config.api_key_file} holds no key; write one per line (--api-key-file)")
        keys += in_file
    if QUIRE_API_KEY.is_set(environ):
        in_environment = QUIRE_API_KEY.get(environ)
        if not in_environment:
            raise ValueError(
                f"{QUIRE_API_KEY.name} is set but empty; give a key, or unset it for a server without keys"
            )
        keys += in_environment
    if not keys and VLLM_API_KEY.is_set(environ):  # --api-key replaces it, as in vLLM
        if not VLLM_API_KEY.get(environ).strip():
            raise ValueError(f"{VLLM_API_KEY.name} is set but empty; give a key, or unset it for a server without keys")
        keys.append(VLLM_API_KEY.get(environ))
    return tuple(dict.fromkeys(keys))
