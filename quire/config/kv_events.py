"""Options of events about the KV cache."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from quire.config.fields import option, require_object, validate

PUBLISHERS = ("zmq", "null")
MAX_PORT = 65535


@dataclass(frozen=True)
class KVEventsOptions:
    """The keys of kv_events_config, as vLLM names them."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # None: zmq if events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def published(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_rank(self, data_parallel_rank: int) -> "KVEventsOptions":
        """With ports of its own for each data-parallel rank."""
        endpoints = {name: _offset(getattr(self, name), data_parallel_rank) for name in ("endpoint", "replay_endpoint")}
        return KVEventsOptions(**{**asdict(self), **endpoints})


@dataclass
class EventsConfig:
    """Events about the KV cache."""

    kv_events_config: dict[str, Any] | None = option(
        None,
        'publish what enters and leaves the KV cache, as JSON: {"enable_kv_cache_events": true, "endpoint": '
        '"tcp://*:5557"}; also replay_endpoint, buffer_steps, hwm, max_queue_size, topic, publisher',
    )

    def __post_init__(self) -> None:
        require_object("kv_events_config", self.kv_events_config)
        validate(self)
        self.events = _read(self.kv_events_config or {})


def _read(given: dict[str, Any]) -> KVEventsOptions:
    known = {field.name: field for field in fields(KVEventsOptions)}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"kv_events_config has {name!r}; allowed: {', '.join(known)}")
        default = known[name].default
        wanted: type = str if default is None else type(default)
        optional = default is None and value is None
        if not optional and (not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))):
            raise ValueError(f"kv_events_config: {name} is {value!r}; it must be a {_WORDS[wanted]}")
        if wanted is int and value < 1:
            raise ValueError(f"kv_events_config: {name} is {value}; it must be at least 1")
        if name.endswith("endpoint") and value is not None and "://" not in value:
            raise ValueError(f"kv_events_config: {name} is {value!r}; it must be like tcp://*:5557 or ipc:///path")
        port = str(value).rpartition(":")[2]
        if name.endswith("endpoint") and port.isdigit() and int(port) > MAX_PORT:
            raise ValueError(f"kv_events_config: {name} is {value!r}; a port is at most {MAX_PORT}")
    if given.get("publisher") not in (None, *PUBLISHERS):
        raise ValueError(f"kv_events_config: publisher is {given['publisher']!r}; allowed: {', '.join(PUBLISHERS)}")
    return KVEventsOptions(**given)


_WORDS = {str: "text", int: "whole number", bool: "truth value"}


def _offset(endpoint: str | None, rank: int) -> str | None:
    if endpoint is None or not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{host}:{int(port) + rank}" if int(port) else endpoint
    return f"{endpoint}_dp{rank}"
