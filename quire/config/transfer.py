"""Options of KV-cache transfer: which connectors an engine has."""

from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.fields import internal, option, validate
from quire.config.shown import shown, without_passwords

ROLES = ("kv_both", "kv_producer", "kv_consumer")
LOAD_FAILURE_POLICIES = ("recompute", "fail")
MULTI = "MultiConnector"
OFFLOADING = "OffloadingConnector"
SHARED_STORAGE = "SharedStorageConnector"
STORES = (SHARED_STORAGE, "ExampleConnector", "RedisConnector")  # what they hold outlives the engine
MAX_GIB = 1 << 30
_KEYS = (
    "kv_connector",
    "kv_role",
    "kv_connector_module_path",
    "kv_connector_extra_config",
    "kv_load_failure_policy",
    "engine_id",
)


@dataclass(frozen=True)
class ConnectorConfig:
    """One connector, and its own options."""

    name: str  # registered, or module:Class
    role: str = "kv_both"
    engine_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "recompute"  # what becomes of a request whose blocks could not be loaded
    device: str = "cpu"  # of the engine's cache
    num_ranks: int = 1  # each of which has a worker's side
    rank: int = 0  # of the worker whose side it is
    shrinks: bool = False  # the CPU tier's size is no wish: it is less where other engines have claimed memory


@dataclass
class TransferConfig:
    """KV-cache transfer."""

    kv_connector: str | None = option(None, "KV connector: noop, or your own class as module:Class")
    kv_transfer_config: dict[str, Any] | list[dict[str, Any]] | None = option(
        None,
        'KV connectors with options, as JSON: {"kv_connector": "module:Class", "kv_connector_extra_config": {...}}; '
        f'several as {{"kv_connector": "{MULTI}", "kv_connector_extra_config": {{"connectors": [...]}}}}',
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory, of all ranks together, for KV-cache blocks that leave the device; 0: none; default: on a "
        "GPU a part of what is free, on a CPU and for models that pool none",
        minimum=0,
        maximum=MAX_GIB,
    )
    kv_offloading_backend: str = option("native", "what keeps them", choices=("native",))
    kv_offloading_policy: str = option(
        "lru", "which are given up first: least recently used, or by recency and frequency", choices=("lru", "arc")
    )
    kv_offloading_path: str | None = option(
        None, "folder for KV-cache blocks, which engines may share, and which outlive them"
    )
    kv_offloading_disk_size: float | None = option(
        None,
        "GiB that the folder may hold; default: 32. What was not used for longest is removed",
        minimum=0.001,
        maximum=MAX_GIB,
    )
    kv_offloading_is_default: bool = internal(False)
    device: str = internal("cpu")
    num_ranks: int = internal(1)

    def __post_init__(self) -> None:
        validate(self)
        if self.kv_connector is not None and self.kv_transfer_config is not None:
            raise ValueError("kv_connector and kv_transfer_config both name connectors; give one of them")
        _ = self.connectors  # raises for what is wrong

    @property
    def connectors(self) -> tuple[ConnectorConfig, ...]:
        """In order of preference."""
        found = list(_read(self.kv_transfer_config or []))
        if self.kv_connector is not None:
            found = [ConnectorConfig(self.kv_connector)]
        if self.kv_offloading_size and not any(one.name == OFFLOADING for one in found):
            size = int(self.kv_offloading_size * 2**30)
            extra: dict[str, Any] = {"cpu_bytes_to_use": size, "eviction_policy": self.kv_offloading_policy}
            found.insert(0, ConnectorConfig(OFFLOADING, extra=extra, shrinks=self.kv_offloading_is_default))
        if self.kv_offloading_path is not None:
            folder: dict[str, Any] = {"shared_storage_path": self.kv_offloading_path}
            if self.kv_offloading_disk_size is not None:
                folder["disk_bytes_to_use"] = int(self.kv_offloading_disk_size * 2**30)
            found.append(ConnectorConfig(SHARED_STORAGE, extra=folder))
        return tuple(replace(one, device=self.device, num_ranks=self.num_ranks) for one in found)


def _read(given: Any) -> tuple[ConnectorConfig, ...]:
    if isinstance(given, (list, tuple)):
        return tuple(connector for one in given for connector in _read(one))
    if not isinstance(given, dict) or not isinstance(given.get("kv_connector"), str):
        raise ValueError(
            f"kv_transfer_config has {shown(without_passwords(given))}; it must be an object with kv_connector, or a "
            "list of such"
        )
    unknown = given.keys() - set(_KEYS)
    if unknown:
        raise ValueError(f"kv_transfer_config has {sorted(unknown)}; allowed: {', '.join(_KEYS)}")
    role, extra = given.get("kv_role", ROLES[0]), given.get("kv_connector_extra_config") or {}
    if role not in ROLES:
        raise ValueError(f"kv_transfer_config: kv_role is {role!r}; allowed: {', '.join(ROLES)}")
    policy = given.get("kv_load_failure_policy", LOAD_FAILURE_POLICIES[0])
    if policy not in LOAD_FAILURE_POLICIES:
        allowed = ", ".join(LOAD_FAILURE_POLICIES)
        raise ValueError(f"kv_transfer_config: kv_load_failure_policy is {policy!r}; allowed: {allowed}")
    if not isinstance(extra, dict):
        raise ValueError(
            f"kv_transfer_config: kv_connector_extra_config is {shown(without_passwords(extra))}; it must be an object"
        )
    name, module = given["kv_connector"], given.get("kv_connector_module_path")
    if name == MULTI:
        if not (several := _read(extra.get("connectors", []))):
            raise ValueError(f"kv_transfer_config: {MULTI} has no connectors; name some (connectors)")
        return several
    path = f"{module}:{name}" if module else name
    return (ConnectorConfig(path, role, given.get("engine_id"), extra, policy),)
