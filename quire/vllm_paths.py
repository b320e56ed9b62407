"""vLLM's module paths: which of our modules has what programs import from them.

A path that is a module of ours as well (`config`, `sampling_params`, `entrypoints.llm`, ...) is found before this table
is read; the others exist only here, and load what they name when it is used.
"""

import importlib
import types
from importlib.machinery import ModuleSpec
from typing import Any

MULTIMODAL = "prompts with images, audio or video"
EMBEDDED = "a server inside your own program (quire serve is one of its own)"
PARSERS = "parsers with vLLM's interface (ours is in docs/tools.md and docs/reasoning.md)"

# path -> home: names. `A=B` is our B under vLLM's name A; `*=f` asks the function f for any name.
MODULES: dict[str, dict[str, str]] = {
    "beam_search": {"entrypoints.beam_search": "BeamSearchOutput BeamSearchSequence"},
    "distributed.parallel_state": {
        "distributed": "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel"
    },
    "distributed.weight_transfer.base": {
        "builtins": "WeightTransferInitRequest=dict WeightTransferUpdateRequest=dict"  # methods take either
    },
    "engine.arg_utils": {"config.engine_args": "AsyncEngineArgs EngineArgs"},
    "engine.async_llm_engine": {
        "engine.async_llm": "AsyncLLMEngine=AsyncLLM",
        "engine.async_engine": "AsyncEngineDeadError=EngineDeadError",
    },
    "engine.protocol": {"engine.async_engine": "EngineClient=AsyncEngine"},
    "entrypoints.chat_utils": {"entrypoints.vllm_utils": "load_chat_template"},
    "entrypoints.openai.api_server": {"entrypoints.cli.main": "main"},
    "entrypoints.openai.run_batch": {"entrypoints.cli.main": "main"},
    "envs": {"entrypoints.vllm_utils": "*=variable"},
    "exceptions": {"builtins": "VLLMValidationError=ValueError"},
    "inputs": {"engine.prompts": "EmbedsPrompt PromptType TextPrompt TokensPrompt"},
    "inputs.data": {"engine.prompts": "EmbedsPrompt PromptType TextPrompt TokensPrompt"},
    "logger": {"entrypoints.vllm_utils": "init_logger"},
    "logprobs": {"engine.logprobs": "FlatLogprobs Logprob LogprobsOnePosition PromptLogprobs SampleLogprobs"},
    "lora.request": {"messages.lora": "LoRARequest"},
    "model_executor.models": {"models.registry": "ModelRegistry"},
    "model_executor.models.registry": {"models.registry": "ModelRegistry"},
    "model_executor.utils": {"entrypoints.vllm_utils": "set_random_seed"},
    "outputs": {
        "engine.outputs": "CompletionOutput RequestOutput",
        "pooling.outputs": "ClassificationOutput ClassificationRequestOutput EmbeddingOutput "
        "EmbeddingRequestOutput PoolingOutput PoolingRequestOutput ScoringOutput ScoringRequestOutput",
    },
    "pooling_params": {"messages.pooling_params": "PoolingParams"},
    "sequence": {"engine.logprobs": "Logprob"},
    "tokenizers": {"tokenizer.user_tokenizer": "TokenizerLike=UserTokenizer get_tokenizer"},
    "transformers_utils.tokenizer": {"tokenizer.user_tokenizer": "AnyTokenizer=UserTokenizer get_tokenizer"},
    "usage.usage_lib": {"entrypoints.vllm_utils": "UsageContext"},
    "utils": {
        "config.engine_args": "FlexibleArgumentParser",
        "entrypoints.vllm_utils": "Counter cdiv get_open_port random_uuid",
    },
    "utils.argparse_utils": {"config.engine_args": "FlexibleArgumentParser"},
    "utils.counter": {"entrypoints.vllm_utils": "Counter"},
    "utils.math_utils": {"entrypoints.vllm_utils": "cdiv"},
    "utils.network_utils": {"entrypoints.vllm_utils": "get_open_port"},
    "utils.torch_utils": {"entrypoints.vllm_utils": "set_random_seed"},
    "v1.engine.async_llm": {"engine.async_llm": "AsyncLLM"},
    "v1.engine.exceptions": {
        "engine.async_engine": "EngineDeadError EngineGenerateError=EngineDeadError EngineStalledError"
    },
    "v1.engine.llm_engine": {"engine.llm_engine": "LLMEngine"},
    "v1.metrics.reader": {"metrics.kinds": "Counter Gauge Histogram Metric Vector"},
    "v1.metrics.stats": {"metrics.request": "RequestStateStats=RequestMetrics", "messages.requests": "SchedulerStats"},
    "v1.sample.logits_processor": {
        "sample.vllm_processors": "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality "
        "RequestLogitsProcessor process_dict_updates"
    },
    "v1.sample.logits_processor.builtin": {"sample.vllm_processors": "process_dict_updates"},
    "v1.sample.logits_processor.interface": {
        "sample.vllm_processors": "BatchUpdate LogitsProcessor MoveDirectionality"
    },
    "version": {"": "__version__"},
}

# Names of features to come, by path ("" is `quire` itself).
UNAVAILABLE: dict[str, dict[str, str]] = {
    "": {
        "initialize_ray_cluster": "several machines",
    },
    "assets.audio": {"AudioAsset": MULTIMODAL},
    "assets.image": {"ImageAsset": MULTIMODAL},
    "assets.video": {"VideoAsset": MULTIMODAL},
    "entrypoints.openai.api_server": dict.fromkeys(("build_async_engine_client", "run_server"), EMBEDDED),
    "entrypoints.openai.cli_args": dict.fromkeys(("make_arg_parser", "validate_parsed_serve_args"), EMBEDDED),
    "inputs": {"ExplicitEncoderDecoderPrompt": "encoder-decoder models"},
    "multimodal": {"MULTIMODAL_REGISTRY": MULTIMODAL},
    "multimodal.utils": {"fetch_image": MULTIMODAL, "fetch_audio": MULTIMODAL},
    "reasoning": dict.fromkeys(("ReasoningParser", "ReasoningParserManager"), PARSERS),
    "tool_parsers": dict.fromkeys(("ToolParser", "ToolParserManager"), PARSERS),
    "v1.metrics.loggers": {"StatLoggerBase": "loggers of statistics of your own"},
}

# `python -m quire.PATH` is this command.
COMMANDS = {"entrypoints.openai.api_server": "serve", "entrypoints.openai.run_batch": "run-batch"}

PATHS = {*MODULES, *UNAVAILABLE} - {""}
PARENTS = {path[:at] for path in PATHS for at, character in enumerate(path) if character == "."}


def to_come(path: str, name: str) -> str:
    return f"{name} is not available yet: {UNAVAILABLE[path][name]}"


def find(path: str, name: str) -> Any:
    """What `from quire.PATH import NAME` gives."""
    if name in UNAVAILABLE.get(path, {}):
        raise AttributeError(to_come(path, name))
    for home, names in MODULES.get(path, {}).items():
        known = dict(_pair(text) for text in names.split())
        if name in known or ("*" in known and not name.startswith("__")):
            module = importlib.import_module(home if home == "builtins" else f"quire.{home}".rstrip("."))
            return getattr(module, known[name]) if name in known else getattr(module, known["*"])(name)
    raise AttributeError(f"module 'quire.{path}' has no attribute {name!r}")


def _pair(text: str) -> tuple[str, str]:
    name, _, ours = text.partition("=")
    return name, ours or name


class Loader:
    """Makes the module of a path in the table."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        path = module.__name__.removeprefix("quire.")
        names = [_pair(text)[0] for home in MODULES.get(path, {}).values() for text in home.split()]
        found: Any = module
        found.__doc__ = f"vLLM's import path {path}."
        found.__all__ = [name for name in names if name != "*"]
        found.__getattr__ = lambda name: find(path, name)
        if path in UNAVAILABLE:
            found.__path__ = []  # so that `from` asks spec_of about what __getattr__ has not got

    def get_code(self, name: str) -> types.CodeType:
        """For `python -m`."""
        command = COMMANDS.get(name.removeprefix("quire."))
        if command is None:
            raise ImportError(f"{name} is an import path of vLLM's and no command; see quire --help")
        # The engine's process runs the main module's code too, under another name.
        lines = (
            "import sys",
            "if __name__ == '__main__':",
            "    from quire.entrypoints.cli.main import main",
            f"    sys.exit(main([{command!r}, *sys.argv[1:]]))",
        )
        return compile("\n".join(lines), name, "exec")


def spec_of(module: str) -> ModuleSpec | None:
    """The spec of `quire.PATH`, if that is in the table. `from` looks for a missing name as a module: there the
    feature is named, so that `hasattr` can be False."""
    path = module.removeprefix("quire.")
    parent, _, name = path.rpartition(".")
    if name in UNAVAILABLE.get(parent, {}):
        raise ImportError(to_come(parent, name), name=module)
    if path not in PATHS and path not in PARENTS:
        return None
    # The origin is what `python -m` puts into sys.argv[0].
    return ModuleSpec(module, Loader(), origin=__file__, is_package=path in PARENTS)  # type: ignore[arg-type]
