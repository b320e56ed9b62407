"""What vLLM's own tests import from vLLM and from their helpers: placeholders, and the few functions that they call."""

import base64
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from quire import __version__
from scripts.vllm_test_server import RemoteServer, StandIn, free_port

PLACEHOLDER = "a test of vLLM's own classes"


class Placeholder:
    """A name that tests import from vLLM; a test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"{PLACEHOLDER}: {self._name}")

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False  # environment variables, and questions about the platform

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class PlaceholderModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Error"):
            value: Any = type(name, (Exception,), {})
        else:
            value = Placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of packages that are not installed: vLLM itself, and what only its own classes need."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Asset:
    def __init__(self, name: str) -> None:
        self.url = name


class _Hub:
    def snapshot_download(self, repo_id: str) -> str:
        return repo_id


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


def install(checkout: Path, stand_in: StandIn) -> None:
    """Make `vllm` and the tests' helpers importable without vLLM."""
    missing = [name for name in ("vllm", "fastapi", "model_hosting_container_standards") if not found(name)]
    sys.meta_path.insert(0, Placeholders(missing))
    import transformers
    import vllm.assets.audio
    import vllm.config
    import vllm.config.utils
    import vllm.entrypoints.openai.run_batch
    import vllm.model_executor.model_loader.weight_utils
    import vllm.platforms
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils
    import vllm.utils.network_utils
    import vllm.v1.engine.detokenizer
    import vllm.version

    class ModelConfig:
        def __init__(self, **_: Any) -> None: ...

        def get_vocab_size(self) -> int:
            return len(stand_in.tokenizer())

    class BatchRequestOutput:
        @staticmethod
        def model_validate_json(line: str) -> None:
            missing = {"id", "custom_id", "response", "error"} - json.loads(line).keys()
            assert not missing, f"a line of the batch lacks {missing}"

    def getattr_iter(holder: Any, names: Sequence[str], default: Any = None, **_: Any) -> Any:
        return next((getattr(holder, name) for name in names if hasattr(holder, name)), default)

    def check_stop_strings(text: str, new: int, stop: Sequence[str], include: bool) -> tuple[str, int] | None:
        found = [(text.find(one), one) for one in stop if one in text]
        return (found[0][1], found[0][0]) if found else None

    replaced: tuple[tuple[Any, dict[str, Any]], ...] = (
        (vllm.assets.audio, {"AudioAsset": _Asset}),
        (vllm.entrypoints.openai.run_batch, {"BatchRequestOutput": BatchRequestOutput}),
        (vllm.config, {"ModelConfig": ModelConfig}),
        (vllm.config.utils, {"getattr_iter": getattr_iter}),
        (vllm.platforms, {"current_platform": _Platform()}),
        (vllm.tokenizers, {"get_tokenizer": stand_in.tokenizer}),
        (vllm.transformers_utils.repo_utils, {"hf_api": _Hub}),
        (vllm.model_executor.model_loader.weight_utils, {"download_weights_from_hf": lambda name, **_: name}),
        (vllm.utils.network_utils, {"get_open_port": free_port}),
        (vllm.v1.engine.detokenizer, {"check_stop_strings": check_stop_strings}),
        (vllm.version, {"__version__": __version__, "_prev_minor_version": lambda: "0.0"}),
    )
    for module, names in replaced:
        for name, value in names.items():
            setattr(module, name, value)
    sys.modules.setdefault("pybase64", base64)
    stand_in.tokenizer()
    real = transformers.AutoConfig.from_pretrained
    transformers.AutoConfig.from_pretrained = lambda name, **more: real(name, **more) if Path(name).exists() else None
    transformers.AutoTokenizer.from_pretrained = stand_in.tokenizer
    RemoteServer.stand_in = stand_in
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    tests = ModuleType("tests")
    tests.__path__ = [str(checkout / "tests")]
    helpers, conftest = PlaceholderModule("tests.utils"), PlaceholderModule("tests.conftest")
    helpers.RemoteOpenAIServer = helpers.RemoteLaunchRenderServer = RemoteServer
    helpers.ROCM_EXTRA_ARGS = []
    helpers.VLLM_PATH = checkout
    helpers.multi_gpu_only = lambda **_: pytest.mark.skip("several GPUs")
    helpers.requires_fp8 = pytest.mark.skip("FP8 weights")
    sys.modules |= {"tests": tests, "tests.utils": helpers, "tests.conftest": conftest}


def found(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name) is not None
