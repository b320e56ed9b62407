"""Tool parsers by name, or by import path for custom ones."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.entrypoints.parsers.base import TextParser

# Creates a parser for one response from the request's tools. Its attribute `markers`, if any, lists special tokens that
# must not be skipped in the text.
ParserFactory = Callable[[Sequence[Mapping[str, Any]]], TextParser]
F = TypeVar("F", bound=ParserFactory)

PACKAGE = "quire.entrypoints.parsers.tools"
BUILT_IN = {
    "apertus": "json_variants:ApertusParser",
    "cohere_command3": "channels:CohereParser",
    "deepseek_v3": "sections:DeepSeekParser",
    "deepseek_v32": "invoke:DeepSeekDsmlParser",
    "dots": "invoke:DotsParser",
    "functiongemma": "gemma:FunctionGemmaParser",
    "gemma4": "gemma:Gemma4Parser",
    "gigachat3": "json_variants:GigaChatParser",
    "glm45": "arg_keys:Glm45Parser",
    "granite": "json_calls:GraniteParser",
    "granite-20b-fc": "json_calls:Granite20bParser",
    "hermes": "json_calls:HermesParser",
    "hy_v3": "arg_keys:HunyuanParser",
    "inkling": "channels:InklingParser",
    "internlm": "json_variants:InternLmParser",
    "jamba": "json_calls:JambaParser",
    "json": "json_variants:OfferedJsonParser",
    "k2_horizon": "arg_keys:K2HorizonParser",
    "kimi_k2": "sections:KimiParser",
    "kimi_k3": "channels:KimiK3Parser",
    "lfm2": "pythonic:Lfm2Parser",
    "llama3_json": "json_calls:Llama3JsonParser",
    "longcat": "json_variants:LongcatParser",
    "minicpm5": "invoke:MiniCpm5Parser",
    "minimax_m2": "invoke:MiniMaxM2Parser",
    "minimax_m3": "minimax_m3:MiniMaxM3Parser",
    "mistral": "mistral:MistralParser",
    "muse_glimmer": "channels:MuseGlimmerParser",
    "olmo3": "pythonic:Olmo3Parser",
    "openai": "harmony:HarmonyParser",
    "phi4_mini_json": "json_calls:Phi4MiniParser",
    "plamo3": "sections:PlamoParser",
    "pythonic": "pythonic:PythonicParser",
    "qwen3_coder": "xml:Qwen3CoderParser",
    "seed_oss": "xml:SeedOssParser",
    "step3": "invoke:Step3Parser",
}
# Models that write another family's format.
ALIASES = {
    "cohere_command4": "cohere_command3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v4": "deepseek_v32",
    "deepseek_v41": "deepseek_v32",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "hy_v4": "hy_v3",
    "ling3": "glm45",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "minimax": "jamba",
    "poolside_v1": "glm45",
    "qwen": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "xlam": "json",
}
BUILT_IN |= {alias: BUILT_IN[name] for alias, name in ALIASES.items()}
NOT_YET = ("hf",)  # it reads the tokenizer's response template
_registered: dict[str, ParserFactory] = {}


def register_tool_parser(name: str) -> Callable[[F], F]:
    """A decorator for plugins' parsers (--tool-parser-plugin); the name of a built-in parser overrides it."""

    def register(factory: F) -> F:
        _registered[name] = factory
        return factory

    return register


class ToolParserManager:
    """vLLM's way to write a registration: @ToolParserManager.register_module("name")."""

    @staticmethod
    def register_module(name: str | Sequence[str], force: bool = True) -> Callable[[F], F]:
        def register(factory: F) -> F:
            for one in [name] if isinstance(name, str) else name:
                if not force and one in known_parsers():
                    raise ValueError(f"the tool parser {one} is registered already")
                register_tool_parser(one)(factory)
            return factory

        return register


def known_parsers() -> list[str]:
    return sorted({*BUILT_IN, *_registered})


def tool_parser(name: str) -> ParserFactory:
    if name in _registered:
        return check_factory(_registered[name], f"the tool parser {name}")
    if name in NOT_YET:
        raise ValueError(f"--tool-call-parser {name} is not available yet: response templates of tokenizers")
    if name in BUILT_IN:
        module, _, attribute = f"{PACKAGE}.{BUILT_IN[name]}".partition(":")
    else:
        module, colon, attribute = name.partition(":")
        if not colon:
            known = ", ".join(known_parsers())
            raise ValueError(
                f"--tool-call-parser {name} is not known; use one of {known}, none, or your own as module:name"
            )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--tool-call-parser {name} cannot be imported: {error}") from error
    return check_factory(found, f"--tool-call-parser {name}")


def check_factory(factory: Any, what: str) -> ParserFactory:
    try:
        parser = factory([])
    except TypeError as error:
        raise ValueError(f"{what} must be callable with the list of tools: {error}") from error
    if not all(callable(getattr(parser, method, None)) for method in ("feed", "finish")):
        raise ValueError(f"{what} does not create a text parser; it needs feed() and finish(), as a ToolParser has")
    made: ParserFactory = factory
    return made
