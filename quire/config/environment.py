"""Every environment variable that Quire reads or sets. Benchmarks aside, no other module touches the environment.

docs/environment.md lists them for users.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar

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

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        text = (os.environ if environ is None else environ).get(self.name)
        if text is None:
            return self.default
        value = self.parse(text)
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _path(text: str) -> str | None:
    return text or None


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

VARIABLES = tuple(value for value in list(globals().values()) if isinstance(value, Variable))
