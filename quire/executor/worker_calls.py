"""How calls of workers' methods and what they return are written: pickled on one machine, typed data on several."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.executor.base import WorkerMethod
from quire.executor.ranks import no_transfer
from quire.executor.step_errors import rebuilt, told
from quire.executor.worker_messages import StepError
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import DraftNeeds, KVCacheConfig, KVCacheGroup, KVCacheSpec
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.speculation import DraftProfile


class Call(NamedTuple):
    method: WorkerMethod
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class WorkerCalls(Protocol):
    def write_call(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes: ...
    def read_call(self, data: bytes) -> Call: ...
    def write_value(self, method: WorkerMethod, value: Any) -> bytes: ...
    def read_value(self, method: WorkerMethod, data: bytes) -> Any: ...
    def write_error(self, error: BaseException) -> bytes: ...
    def read_error(self, data: bytes) -> Exception: ...


class PickledCalls:
    """Any method or function, which a process may do with its own children: their sockets lie in a folder that no
    other user can open."""

    def write_call(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        return pickle.dumps((method, tuple(args), dict(kwargs)))

    def read_call(self, data: bytes) -> Call:
        return Call(*pickle.loads(data))

    def write_value(self, method: WorkerMethod, value: Any) -> bytes:
        return pickle.dumps(value)

    def read_value(self, method: WorkerMethod, data: bytes) -> Any:
        return pickle.loads(data)

    def write_error(self, error: BaseException) -> bytes:
        return pickled_error(error)

    def read_error(self, data: bytes) -> Exception:
        error: Exception = pickle.loads(data)
        return error


def pickled_error(error: BaseException) -> bytes:
    """The exception itself, if its type survives that."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


class TypedCalls:
    """The methods listed below, with plain data: what comes over a network cannot name code to run."""

    def write_call(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        if not isinstance(method, str) or method not in METHODS or kwargs:
            name = method if isinstance(method, str) else f"the function {getattr(method, '__name__', method)}"
            raise ValueError(
                f"{name} cannot be called on workers of several machines; allowed: {', '.join(METHODS)}, without "
                "keyword arguments"
            )
        return msgspec.msgpack.encode((method, METHODS[method].write_args(*args)))

    def read_call(self, data: bytes) -> Call:
        method, args = msgspec.msgpack.decode(data, type=tuple[str, list[Any]])
        if method not in METHODS:
            raise ValueError(f"{method} is not a method that another machine may call; allowed: {', '.join(METHODS)}")
        return Call(method, METHODS[method].read_args(*args), {})

    def write_value(self, method: WorkerMethod, value: Any) -> bytes:
        return msgspec.msgpack.encode(METHODS[str(method)].write_value(value))

    def read_value(self, method: WorkerMethod, data: bytes) -> Any:
        return METHODS[str(method)].read_value(msgspec.msgpack.decode(data, strict=False))

    def write_error(self, error: BaseException) -> bytes:
        return msgspec.msgpack.encode(told(error))

    def read_error(self, data: bytes) -> Exception:
        return rebuilt(msgspec.msgpack.decode(data, type=StepError))


def _same(value: Any) -> Any:
    return value


def _together(*args: Any) -> tuple[Any, ...]:
    return args


def _as(kind: Any) -> Callable[[Any], Any]:
    return lambda value: msgspec.convert(value, kind)


class Method(NamedTuple):
    """How its arguments and its result become plain data, and are read from it."""

    read_value: Callable[[Any], Any]
    write_value: Callable[[Any], Any] = _same
    write_args: Callable[..., Sequence[Any]] = _together
    read_args: Callable[..., tuple[Any, ...]] = _together


def _kinds(kind: type[KVCacheSpec]) -> dict[str, type[KVCacheSpec]]:
    found = {kind.__name__: kind}
    for each in kind.__subclasses__():
        found |= _kinds(each)
    return found


def _write_spec(spec: KVCacheSpec) -> tuple[str, Any]:
    return type(spec).__name__, spec


def _read_spec(told: Any) -> KVCacheSpec:
    name, fields = told
    spec: KVCacheSpec = msgspec.convert(fields, _kinds(KVCacheSpec)[name])
    return spec


def _write_specs(specs: Mapping[int, KVCacheSpec]) -> list[Any]:
    return [(layer, _write_spec(spec)) for layer, spec in specs.items()]


def _read_specs(told: Any) -> dict[int, KVCacheSpec]:
    return {int(layer): _read_spec(spec) for layer, spec in told}


def _write_layout(config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> Sequence[Any]:
    groups = [(group.layers, _write_spec(group.spec)) for group in config.groups]
    return config.num_blocks, groups, max_model_len


def _read_layout(num_blocks: int, groups: Any, max_model_len: int) -> tuple[Any, ...]:
    made = tuple(KVCacheGroup(tuple(layers), _read_spec(spec)) for layers, spec in groups)
    return KVCacheConfig(num_blocks, made), max_model_len, no_transfer


def _write_adapter(request: LoRARequest) -> Sequence[Any]:
    return (msgspec.to_builtins(request),)


def _read_adapter(told: Any) -> tuple[LoRARequest]:
    return (msgspec.convert(told, LoRARequest),)


METHODS = {
    "adapter_news": Method(_as(list[AdapterNews])),
    "describe": Method(_as(str)),
    "draft_needs": Method(_as(DraftNeeds)),
    "drop_adapter": Method(_as(None)),
    "feature_support": Method(_as(FeatureSupport | None)),
    "get_draft_profile": Method(_as(DraftProfile)),
    "initialize_kv_cache": Method(_as(None), write_args=_write_layout, read_args=_read_layout),
    "kv_cache_memory": Method(_as(int)),
    "kv_cache_specs": Method(_read_specs, _write_specs),
    "load_adapter": Method(_as(None), write_args=_write_adapter, read_args=_read_adapter),
    "place_adapter": Method(_as(None)),
    "save_sharded_state": Method(_as(None)),
    "start_profile": Method(_as(None)),
    "stop_profile": Method(_as(str | None)),
    "use_adapter": Method(_as(None)),
}
