"""The table of vLLM's flags and engine arguments: which work, which are accepted and why, which are to come."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.fields import flag
from quire.config.logs import say_once
from quire.config.vllm.accepted import ACCEPTED, SERVER_ARGUMENTS
from quire.config.vllm.not_yet import NOT_YET
from quire.config.vllm.unpack import OBJECTS
from quire.config.vllm.works import WORKS

SHORT = {
    "-asc": "api_server_count",
    "-q": "quantization",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-n": "nnodes",
    "-r": "node_rank",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-ep": "enable_expert_parallel",
    "-sc": "speculative_config",
    "-dc": "diffusion_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
}
OTHER_NAMES = {
    "device_memory_utilization": "gpu_memory_utilization",
    "guided_decoding_backend": "structured_outputs_backend",  # of older releases
    "override_pooler_config": "pooler_config",
}
# Of what works without an option.
KINDS = dict.fromkeys(OBJECTS, "json") | {"fail_on_environ_validation": "switch", "task": "text"}
# vLLM's default is None: it means the default here too.
NONE_IS_DEFAULT = (
    "async_scheduling",
    "block_size",
    "disable_cascade_attn",
    "distributed_timeout_seconds",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "seed",
)


@dataclass(frozen=True)
class Row:
    """A flag, and the engine argument of the same name if there is one."""

    name: str
    status: str  # works, accepted, not yet
    note: str  # the test that observes it, the reason, or the feature
    kind: str = "option"  # of the value: option (a field of a config class has it), switch, int, float, text, ...
    neutral: tuple[Any, ...] = ()  # values that ask for nothing

    def is_neutral(self, value: Any) -> bool:
        if value is None or value in self.neutral:
            return True
        if value is False:
            return True not in self.neutral  # a switch that is on by default asks for something when it is off
        if isinstance(value, Mapping):
            return not any(value.values())
        return isinstance(value, list | tuple | set) and not value

    @property
    def neutral_text(self) -> str:
        empty = {"json": "{}", "texts": "[]", "switch": "False"}
        return ", ".join(map(repr, self.neutral)) or empty.get(self.kind, "None")


def _rows() -> dict[str, Row]:
    rows = [Row(name, "works", test, KINDS.get(name, "option")) for name, test in WORKS.items()]
    for reason, names in ACCEPTED.items():
        rows += [Row(name, "accepted", reason, kind) for name, kind in names.items()]
    for feature, values in NOT_YET.items():
        rows += [Row(name, "not yet", feature, str(kind), tuple(rest)) for name, (kind, *rest) in values.items()]
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "a flag is in the table twice"
    return table


TABLE = _rows()


def settle(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `options` has a place for. Those that are accepted are named once in the log; a ValueError
    says which feature is not available yet."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        name = OTHER_NAMES.get(name, name)
        row = TABLE.get(name)
        if value is None and name in NONE_IS_DEFAULT:
            continue
        if row is None or row.status == "works" or (row.status == "accepted" and name in options):
            if name in SERVER_ARGUMENTS and name not in options:
                if value is not None:
                    say_once(f"{name} has no effect here: it is for the server")
            else:
                kept[name] = value
        elif row.status == "accepted":
            if value is not None:
                say_once(f"{flag(name)} is accepted: {row.note}")
        elif not row.is_neutral(value):
            raise ValueError(
                f"not available yet: {row.note}; {name} is {value!r}, leave it out or pass {row.neutral_text} "
                f"({flag(name)})"
            )
    return kept
