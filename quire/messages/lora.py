"""Adapters as requests name them, and what a worker tells of those it loads."""

from typing import Any

import msgspec

MAX_LORA_NAME, MAX_LORA_PATH = 256, 4096
MAX_LORA_ID = 2**31 - 1
CONFIG, SAFETENSORS, PICKLED = ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter in PEFT's format: its name, a number that is its alone, and the folder that it lies in.

    The other fields are vLLM's: `base_model_name` is shown as the adapter's parent, `load_inplace` loads an adapter
    anew that was loaded by this number before.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        for name, most in (("lora_name", MAX_LORA_NAME), ("lora_path", MAX_LORA_PATH)):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= most or "\0" in value:
                raise ValueError(f"{name} is {str(value)[:80]!r}; it must be a text of 1 to {most} characters")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= MAX_LORA_ID:
            raise ValueError(f"lora_int_id is {number!r}; it must be a whole number from 1 to {MAX_LORA_ID}")
        if not isinstance(self.base_model_name, str | None):
            raise ValueError(f"base_model_name is {str(self.base_model_name)[:80]!r}; it must be a text, or None")
        if self.tensorizer_config_dict:
            raise ValueError("tensorizer_config_dict is not available; leave it out")

    # vLLM's short names.
    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


class AdapterNews(msgspec.Struct, frozen=True):
    """An adapter is in host memory, or (`slot` is given) in that slot of the device; or (`error`) why it is not."""

    lora_id: int
    content: bytes = b""  # a hash of what decides about its results
    num_bytes: int = 0
    slot: int | None = None
    error: str | None = None


class AdapterStats(msgspec.Struct, frozen=True):
    """Of all adapters of an engine."""

    max_loras: int = 0
    running: tuple[str, ...] = ()  # names of those that running requests use
    waiting: tuple[str, ...] = ()  # of those that requests wait for
    num_host: int = 0  # in host memory
    num_device: int = 0  # in slots
    num_loads: int = 0  # from disk
    num_placed: int = 0  # copied into a slot
    num_evicted: int = 0  # from slots
