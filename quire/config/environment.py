"""Every environment variable that Quire reads or sets. Benchmarks aside, no other module touches the environment.

docs/environment.md lists them for users.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Environ = MutableMapping[str, str]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable and how to read it. `environ` stands in for the process's environment, in tests."""

    name: str
    parse: Callable[[str], T]
    default: T  # what `get` returns where it is not set
    meaning: str
    default_text: str = ""  # for the docs, where `default` does not say it
    choices: tuple[T, ...] = ()
    documented: bool = True  # False: not for users
    positive: bool = False

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        text = (os.environ if environ is None else environ).get(self.name)
        if text is None:
            return self.default
        try:
            value = self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name} is {text!r}; it must be a number like {self.default}") from None
        if self.positive and not 0 < float(text) < math.inf:
            raise ValueError(f"{self.name} is {text!r}; it must be more than 0")
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name} is {text!r}; allowed: {', '.join(map(str, self.choices))}")
        return value

    def is_set(self, environ: Mapping[str, str] | None = None) -> bool:
        return self.name in (os.environ if environ is None else environ)

    def set(self, value: str, environ: Environ | None = None) -> None:
        """For a library that reads it, and for child processes."""
        (os.environ if environ is None else environ)[self.name] = value

    def set_default(self, value: str | None = None, environ: Environ | None = None) -> None:
        """`set`, to `default` if no value is given, unless the user has set it."""
        if not self.is_set(environ):
            self.set(str(self.default) if value is None else value, environ)


def process_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of this process's environment, with changes for a child process."""
    return os.environ | (changes or {})


FORWARDED = ("QUIRE_CPU_ISA", "QUIRE_NATIVE_KERNELS", "QUIRE_PLUGINS", "VLLM_PLUGINS", "HF_TOKEN", "OMP_WAIT_POLICY")


def forwarded() -> dict[str, str]:
    """What workers on other machines, and processes that started earlier, must know of this process's environment."""
    return {name: os.environ[name] for name in FORWARDED if name in os.environ}


def receive_forwarded(found: Mapping[str, str]) -> None:
    os.environ.update(found)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _path(text: str) -> str | None:
    return text or None


def _switch(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


QUIRE_API_KEY = Variable[tuple[str, ...]](
    "QUIRE_API_KEY",
    _names,
    (),
    "API keys that `quire serve` accepts, comma-separated, beside `--api-key` and `--api-key-file`; client commands "
    "(`quire chat --url`, `complete`, `run-batch --url`) send the first",
    default_text="none",
)
OPENAI_API_KEY = Variable[tuple[str, ...]](
    "OPENAI_API_KEY", _names, (), "what client commands send if `QUIRE_API_KEY` has no key", default_text="none"
)
QUIRE_PLUGINS = Variable[tuple[str, ...] | None](
    "QUIRE_PLUGINS",
    _names,
    None,
    "names of the [plugins](models.md) to run, comma-separated; empty: none",
    default_text="all installed",
)
QUIRE_CPU_ISA = Variable[str](
    "QUIRE_CPU_ISA",
    str,
    "amx",
    "highest instruction set on a CPU, for kernels, torch and oneDNN: `amx`, `avx512`, `avx2` or `portable`",
    choices=("amx", "avx512", "avx2", "portable"),
)
QUIRE_NATIVE_KERNELS = Variable[bool](
    "QUIRE_NATIVE_KERNELS", lambda text: text != "0", True, "`0`: torch instead of C kernels on a CPU", "`1`"
)
QUIRE_SHARE_GPU = Variable[bool](
    "QUIRE_SHARE_GPU", _switch, False, "`1`: ranks may share a GPU, with collectives through the host, for tests", "`0`"
)
QUIRE_CLUSTER_TOKEN = Variable[str](
    "QUIRE_CLUSTER_TOKEN",
    str,
    "",
    "with `--nnodes`: the secret by which the machines of an engine know one another, the same on all",
    default_text="none",
)
XDG_CACHE_HOME = Variable[str | None](
    "XDG_CACHE_HOME", _path, None, "compiled C kernels are cached in its folder `quire`", "`~/.cache`"
)
TMPDIR = Variable[str | None](
    "TMPDIR", _path, None, "folder for temporary files and for the sockets between processes", "`/tmp`"
)
TRITON_HOME = Variable[str | None](
    "TRITON_HOME", _path, None, "folder that holds Triton's `.triton/cache`", "the home folder"
)
TRITON_CACHE_DIR = Variable[str | None](
    "TRITON_CACHE_DIR",
    _path,
    None,
    "Triton's compiled kernels; not used if other users can write to it",
    "`.triton/cache` in `TRITON_HOME`",
)
TRITON_INTERPRET = Variable[bool](
    "TRITON_INTERPRET",
    lambda text: text == "1",
    False,
    "`1`: Triton kernels are interpreted on CPU tensors, for tests",
    "`0`",
    documented=False,
)
HF_TOKEN = Variable[str | None](
    "HF_TOKEN", _path, None, "token for gated and private models of the hub; `--hf-token` sets it", "the stored one"
)
OTEL_SERVICE_NAME = Variable[str]("OTEL_SERVICE_NAME", str, "quire", "service name of OpenTelemetry spans")
OTEL_EXPORTER_OTLP_TRACES_PROTOCOL = Variable[str](
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    str,
    "grpc",
    "protocol of `--otlp-traces-endpoint`: `grpc` or `http/protobuf`",
    choices=("grpc", "http/protobuf"),
)
NO_COLOR = Variable[bool]("NO_COLOR", bool, False, "any text: no colours in the terminal", "not set")
TERM = Variable[str | None]("TERM", str, None, "`dumb`: no colours in the terminal", "not set")
PYTORCH_ALLOC_CONF = Variable[str](
    "PYTORCH_ALLOC_CONF", str, "", "torch's allocator; sleep mode on a GPU refuses `expandable_segments:True`", "none"
)
PYTORCH_CUDA_ALLOC_CONF = Variable[str]("PYTORCH_CUDA_ALLOC_CONF", str, "", "the same, by its older name", "none")

# Libraries read these; Quire sets them where the user has not.
OMP_WAIT_POLICY = Variable[str | None](
    "OMP_WAIT_POLICY", str, None, "how OpenMP's threads wait; if set, Quire does not set `GOMP_SPINCOUNT`", "not set"
)
GOMP_SPINCOUNT = Variable[str](
    "GOMP_SPINCOUNT", str, "3000", "how long libgomp's threads in the engine's process spin before they sleep"
)
LRU_CACHE_CAPACITY = Variable[str](
    "LRU_CACHE_CAPACITY", str, "128", "matrix products that torch keeps compiled in the engine's process"
)
ONEDNN_PRIMITIVE_CACHE_CAPACITY = Variable[str](
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY", str, "128", "primitives that oneDNN keeps compiled in the engine's process"
)
GLOO_SOCKET_IFNAME = Variable[str](
    "GLOO_SOCKET_IFNAME", str, "lo", "network interface of gloo's collectives between ranks"
)
RAY_ADDRESS = Variable[str]("RAY_ADDRESS", str, "", "the Ray cluster to join", documented=False)

# torchrun sets these, and any other program that starts the processes of an external launcher.
RANK = Variable[int]("RANK", int, 0, "this process's number", documented=False)
WORLD_SIZE = Variable[int]("WORLD_SIZE", int, 1, "processes in all", documented=False)
LOCAL_RANK = Variable[int]("LOCAL_RANK", int, 0, "this process's number on its machine", documented=False)
LOCAL_WORLD_SIZE = Variable[int]("LOCAL_WORLD_SIZE", int, 1, "processes on this machine", documented=False)
MASTER_ADDR = Variable[str]("MASTER_ADDR", str, "", "of the first process's machine", documented=False)
MASTER_PORT = Variable[int]("MASTER_PORT", int, 0, "where processes meet", documented=False)
LAUNCHED = (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)

ONEDNN_MAX_CPU_ISA = Variable[str | None](
    "ONEDNN_MAX_CPU_ISA",
    str,
    None,
    "highest instruction set of oneDNN; limited too where AMX would crash it",
    "by `QUIRE_CPU_ISA`",
)
ATEN_CPU_CAPABILITY = Variable[str | None](
    "ATEN_CPU_CAPABILITY", str, None, "highest instruction set of torch's own kernels", "by `QUIRE_CPU_ISA`"
)

# vLLM's, for those who come from there; all others of its variables are reported as without effect.
VLLM_API_KEY = Variable[str](
    "VLLM_API_KEY", str, "", "the key that `quire serve` accepts if no other source has one", default_text="none"
)
VLLM_PLUGINS = Variable[tuple[str, ...] | None](
    "VLLM_PLUGINS", _names, None, "what `QUIRE_PLUGINS` is if that is not set", default_text="not set"
)
VLLM_CONFIGURE_LOGGING = Variable[bool](
    "VLLM_CONFIGURE_LOGGING", _switch, True, "`0`: your program configures logging", "`1`"
)
VLLM_LOGGING_LEVEL = Variable[str](
    "VLLM_LOGGING_LEVEL", str.upper, "INFO", "lowest level of log lines", choices=LOG_LEVELS
)
VLLM_LOGGING_CONFIG_PATH = Variable[str | None](
    "VLLM_LOGGING_CONFIG_PATH", _path, None, "default of `--log-config-file`", "not set"
)
VLLM_LOGGING_PREFIX = Variable[str]("VLLM_LOGGING_PREFIX", str, "", "text before each log line", "none")
VLLM_LOGGING_STREAM = Variable[str](
    "VLLM_LOGGING_STREAM",
    str,
    "ext://sys.stderr",
    "where log lines go",
    choices=("ext://sys.stderr", "ext://sys.stdout"),
)
VLLM_LOG_STATS_INTERVAL = Variable[float](
    "VLLM_LOG_STATS_INTERVAL", float, 10.0, "seconds between log lines about load and throughput", positive=True
)
VLLM_SERVER_DEV_MODE = Variable[bool](
    "VLLM_SERVER_DEV_MODE", _switch, False, "`1`: the same as `--enable-admin`", "`0`"
)
VLLM_ALLOW_RUNTIME_LORA_UPDATING = Variable[bool](
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING", _switch, False, "`1`: the same as `--allow-runtime-lora-updating`", "`0`"
)
VLLM_LORA_RESOLVER_CACHE_DIR = Variable[str | None](
    "VLLM_LORA_RESOLVER_CACHE_DIR", str, None, "default of `--lora-folder`", "none"
)
VLLM_SKIP_MODEL_NAME_VALIDATION = Variable[bool](
    "VLLM_SKIP_MODEL_NAME_VALIDATION", _switch, False, "`1`: the same as `--skip-model-name-validation`", "`0`"
)
VLLM_BATCH_INVARIANT = Variable[bool](
    "VLLM_BATCH_INVARIANT", _switch, False, "`1`: the same as `--batch-invariant`", "`0`"
)
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS = Variable[float](
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", float, 300.0, "default of `--engine-stall-timeout`"
)
VLLM_HTTP_TIMEOUT_KEEP_ALIVE = Variable[int](
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", int, 5, "default of `--timeout-keep-alive`"
)
VLLM_MAX_N_SEQUENCES = Variable[int]("VLLM_MAX_N_SEQUENCES", int, 128, "default of `--max-n`")
VLLM_MAX_STOP_STRINGS = Variable[int]("VLLM_MAX_STOP_STRINGS", int, 64, "default of `--max-stop`")
VLLM_MAX_COMPLETION_PROMPTS = Variable[int]("VLLM_MAX_COMPLETION_PROMPTS", int, 1024, "default of `--max-prompts`")
VLLM_XGRAMMAR_CACHE_MB = Variable[int](
    "VLLM_XGRAMMAR_CACHE_MB",
    lambda text: int(text) << 20,
    256 << 20,
    "default of `--structured-outputs-cache-bytes`, in MiB",
    "`256`",
)
VLLM_REGEX_COMPILATION_TIMEOUT_S = Variable[float](
    "VLLM_REGEX_COMPILATION_TIMEOUT_S", float, 10.0, "default of `--structured-outputs-compile-seconds`"
)
VLLM_CPU_KVCACHE_SPACE = Variable[int](
    "VLLM_CPU_KVCACHE_SPACE",
    lambda text: int(float(text) * (1 << 30)),
    0,
    "on a CPU: default of `--kv-cache-memory-bytes`, in GiB; `0`: a part of the memory",
)

# Options of the command line that have their default from a variable, if that is set.
OPTION_DEFAULTS: dict[str, Variable[Any]] = {
    "enable_admin": VLLM_SERVER_DEV_MODE,
    "allow_runtime_lora_updating": VLLM_ALLOW_RUNTIME_LORA_UPDATING,
    "lora_folder": VLLM_LORA_RESOLVER_CACHE_DIR,
    "skip_model_name_validation": VLLM_SKIP_MODEL_NAME_VALIDATION,
    "batch_invariant": VLLM_BATCH_INVARIANT,
    "engine_stall_timeout": VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
    "timeout_keep_alive": VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
    "max_n": VLLM_MAX_N_SEQUENCES,
    "max_stop": VLLM_MAX_STOP_STRINGS,
    "max_prompts": VLLM_MAX_COMPLETION_PROMPTS,
    "structured_outputs_cache_bytes": VLLM_XGRAMMAR_CACHE_MB,
    "structured_outputs_compile_seconds": VLLM_REGEX_COMPILATION_TIMEOUT_S,
}

# vLLM's variables that ask for what is so already, or that only its build and images read.
TRUE_ALREADY = frozenset(
    {
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        "VLLM_USAGE_SOURCE",
        "VLLM_USAGE_STATS_SERVER",
        "VLLM_DISABLE_LOG_LOGO",
        "VLLM_TARGET_DEVICE",
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_BUILD_COMMIT",
        "VLLM_BUILD_PIPELINE",
        "VLLM_BUILD_URL",
        "VLLM_DOCKER_BUILD_CONTEXT",
        "VLLM_IMAGE_TAG",
        "VLLM_MAIN_CUDA_VERSION",
        "VLLM_USE_PRECOMPILED",
    }
)

VARIABLES = tuple(value for value in list(globals().values()) if isinstance(value, Variable))


def option_defaults(names: Collection[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The defaults that the environment sets for these options."""
    found = {name: variable for name, variable in OPTION_DEFAULTS.items() if name in names}
    return {name: variable.get(environ) for name, variable in found.items() if variable.is_set(environ)}


def without_effect(environ: Mapping[str, str] | None = None) -> list[str]:
    """vLLM's variables that are set and that nothing here reads."""
    read = TRUE_ALREADY | {variable.name for variable in VARIABLES}
    return sorted(
        name for name in (os.environ if environ is None else environ) if name.startswith("VLLM_") and name not in read
    )
