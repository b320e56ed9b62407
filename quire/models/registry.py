"""Which class serves which architecture: built-in families, and those that plugins register."""

import importlib
import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.models.decoder import DecoderModel

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class BuiltIn:
    """A built-in family, as listed by `quire models` and docs/models.md."""

    architecture: str  # as in config.json
    target: str  # module:Class within quire.models
    family: str
    kind: str = "dense"  # or "MoE", "encoder"
    gguf: str = ""  # its architecture in GGUF files; empty: these do not load
    note: str = ""


def _encoder(prefix: str, target: str, family: str, note: str = "") -> tuple[BuiltIn, ...]:
    """An encoder as its checkpoints name it: alone, with the head that it was trained with, with one for classes."""
    suffixes = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return tuple(BuiltIn(prefix + suffix, target, family, "encoder", "", note) for suffix in suffixes)


LATENT = "latent attention"

BUILT_IN = (
    BuiltIn("LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 2, 3.x, SmolLM", "dense", "llama"),
    BuiltIn("MistralForCausalLM", "mistral:MistralForCausalLM", "Mistral", "dense", "llama", "sliding window"),
    BuiltIn("Qwen2ForCausalLM", "qwen2:Qwen2ForCausalLM", "Qwen2, Qwen2.5", "dense", "qwen2", "some layers windowed"),
    BuiltIn("Qwen3ForCausalLM", "qwen3:Qwen3ForCausalLM", "Qwen3", "dense", "qwen3", "normed queries and keys"),
    BuiltIn("GemmaForCausalLM", "gemma:GemmaForCausalLM", "Gemma", "dense", "gemma"),
    BuiltIn("Gemma2ForCausalLM", "gemma:Gemma2ForCausalLM", "Gemma 2", "dense", "gemma2", "soft-capped, mixed windows"),
    BuiltIn("Gemma3ForCausalLM", "gemma:Gemma3ForCausalLM", "Gemma 3 (text)", "dense", "gemma3", "mixed windows"),
    BuiltIn("Phi3ForCausalLM", "phi3:Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4", "dense", "phi3", "LongRoPE"),
    BuiltIn("Olmo2ForCausalLM", "olmo2:Olmo2ForCausalLM", "OLMo 2", "dense", "olmo2"),
    BuiltIn("Olmo3ForCausalLM", "olmo2:Olmo3ForCausalLM", "OLMo 3", "dense", "olmo2", "mixed windows"),
    BuiltIn("GraniteForCausalLM", "granite:GraniteForCausalLM", "Granite 3.x", "dense", "granite"),
    BuiltIn("SmolLM3ForCausalLM", "smollm3:SmolLM3ForCausalLM", "SmolLM3", "dense", "smollm3", "some layers unrotated"),
    BuiltIn("GPT2LMHeadModel", "gpt2:GPT2LMHeadModel", "GPT-2", "dense", "gpt2"),
    BuiltIn("GPTNeoXForCausalLM", "gpt_neox:GPTNeoXForCausalLM", "GPT-NeoX, Pythia", "dense", "gptneox"),
    BuiltIn("OPTForCausalLM", "opt:OPTForCausalLM", "OPT", "dense", "", "not the 350M"),
    BuiltIn("FalconForCausalLM", "falcon:FalconForCausalLM", "Falcon, Falcon 2", "dense", "falcon", "RW not as GGUF"),
    BuiltIn("Starcoder2ForCausalLM", "starcoder2:Starcoder2ForCausalLM", "StarCoder2", "dense", "starcoder2"),
    BuiltIn("CohereForCausalLM", "cohere:CohereForCausalLM", "Command R, Aya", "dense", "command-r"),
    BuiltIn("Cohere2ForCausalLM", "cohere:Cohere2ForCausalLM", "Command R7B, A", "dense", "cohere2", "mixed windows"),
    BuiltIn("GlmForCausalLM", "glm:GlmForCausalLM", "GLM-4", "dense", "chatglm"),
    BuiltIn("Glm4ForCausalLM", "glm:Glm4ForCausalLM", "GLM-4-0414", "dense", "glm4"),
    BuiltIn("MiniCPM3ForCausalLM", "minicpm3:MiniCPM3ForCausalLM", "MiniCPM3", "dense", "", LATENT),
    BuiltIn("MixtralForCausalLM", "mixtral:MixtralForCausalLM", "Mixtral", "MoE", "llama"),
    BuiltIn(
        "Qwen2MoeForCausalLM",
        "qwen_moe:Qwen2MoeForCausalLM",
        "Qwen1.5-MoE, Qwen2-MoE",
        "MoE",
        "qwen2moe",
        "shared expert",
    ),
    BuiltIn("Qwen3MoeForCausalLM", "qwen_moe:Qwen3MoeForCausalLM", "Qwen3-MoE", "MoE", "qwen3moe"),
    BuiltIn("OlmoeForCausalLM", "olmoe:OlmoeForCausalLM", "OLMoE", "MoE", "olmoe"),
    BuiltIn("GraniteMoeForCausalLM", "granite_moe:GraniteMoeForCausalLM", "Granite 3.x MoE", "MoE", "granitemoe"),
    BuiltIn("DeepseekV2ForCausalLM", "deepseek:DeepseekV2ForCausalLM", "DeepSeek-V2, V2-Lite", "MoE", "", LATENT),
    BuiltIn(
        "DeepseekV3ForCausalLM",
        "deepseek:DeepseekV3ForCausalLM",
        "DeepSeek-V3, R1, V3.1, Kimi-K2, Moonlight",
        "MoE",
        "",
        LATENT,
    ),
    BuiltIn(
        "DeepseekV32ForCausalLM",
        "deepseek:DeepseekV32ForCausalLM",
        "DeepSeek-V3.2",
        "MoE",
        "",
        "sparse latent attention, by torch alone",
    ),
    BuiltIn(
        "GlmMoeDsaForCausalLM",
        "deepseek:GlmMoeDsaForCausalLM",
        "GLM-5",
        "MoE",
        "",
        "sparse latent attention, by torch alone",
    ),
    BuiltIn("Glm4MoeLiteForCausalLM", "deepseek:Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", "MoE", "", LATENT),
    BuiltIn("Glm4MoeForCausalLM", "glm4_moe:Glm4MoeForCausalLM", "GLM-4.5, 4.6", "MoE", "", "shared expert"),
    BuiltIn("Dots1ForCausalLM", "dots1:Dots1ForCausalLM", "dots.llm1", "MoE", "", "shared experts"),
    BuiltIn("Ernie4_5_MoeForCausalLM", "ernie_moe:Ernie4_5_MoeForCausalLM", "ERNIE 4.5", "MoE", "", "shared experts"),
    BuiltIn("MiniMaxM2ForCausalLM", "minimax_m2:MiniMaxM2ForCausalLM", "MiniMax-M2", "MoE"),
    BuiltIn("GptOssForCausalLM", "gpt_oss:GptOssForCausalLM", "gpt-oss", "MoE", "gpt-oss", "mixed windows; mxfp4"),
    *_encoder("Bert", "bert:BertModel", "BERT, MiniLM, BGE, E5, GTE"),
    *_encoder("Roberta", "bert:RobertaModel", "RoBERTa"),
    *_encoder("XLMRoberta", "bert:RobertaModel", "XLM-RoBERTa, multilingual E5, BGE-M3"),
    *_encoder("Camembert", "bert:RobertaModel", "CamemBERT"),
    *_encoder("DistilBert", "distilbert:DistilBertModel", "DistilBERT"),
    *_encoder("MPNet", "mpnet:MPNetModel", "MPNet"),
    *_encoder("ModernBert", "modernbert:ModernBertModel", "ModernBERT, GTE", "mixed windows"),
    *_encoder("NomicBert", "nomic_bert:NomicBertModel", "NomicBERT"),
    *_encoder("Gte", "gte:GteModel", "GTE v1.5 and multilingual"),
    *_encoder("New", "gte:GteModel", "GTE v1.5 and multilingual, as first published"),
    *_encoder("EuroBert", "eurobert:EuroBertModel", "EuroBERT", "no heads for sequences"),
    BuiltIn("Gemma3TextModel", "gemma:Gemma3TextModel", "EmbeddingGemma", "encoder", "", "mixed windows"),
)
# Architectures that neither we nor transformers' code can serve here, and what they need.
MISSING = MappingProxyType(
    {
        "DeepseekV4ForCausalLM": "attention over compressed tokens beside a window of single ones, chosen by an index; "
        "hyper-connections between layers; output projections in groups; layers whose experts are chosen by token id",
        "KimiK25ForConditionalGeneration": "the encoder of images and videos; its other layers are those of Kimi-K2, "
        "which is served as DeepseekV3ForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration": "attention to blocks of keys that an index selects; the encoder of "
        "images and videos",
        "Glm5NextForConditionalGeneration": "layers with a recurrent state; layers that attend to the tokens which the "
        "index of a layer before has selected; the encoder of images and videos",
    }
)
ARCHITECTURES = MappingProxyType({one.architecture: one for one in BUILT_IN})


class Registry:
    """The built-in families and, before them, what was registered here."""

    def __init__(self) -> None:
        self._registered: dict[str, type | str] = {}

    def register_model(self, architecture: str, model: type | str) -> None:
        """Serve `architecture` with a class, or with "module:Class", which is imported only when it is needed.

        Prefer the name for a class that imports torch or CUDA code: the plugin then stays cheap to load.
        """
        if isinstance(model, str):
            module, _, attribute = model.partition(":")
            if not module or not attribute.isidentifier():
                raise ValueError(f"a model is given as a class or as 'module:Class', not as {model!r}")
        elif not isinstance(model, type):
            raise TypeError(f"a model is given as a class or as 'module:Class', not as a {type(model).__name__}")
        if architecture in self.get_supported_archs():
            logger.warning("%s was registered before; from now on it is %s", architecture, _name(model))
        self._registered[architecture] = model

    def get_supported_archs(self) -> list[str]:
        return [*ARCHITECTURES, *(name for name in self._registered if name not in ARCHITECTURES)]

    def registered(self) -> dict[str, type | str]:
        """Architectures registered by plugins, also those that replace a built-in family."""
        return dict(self._registered)

    def origin(self, architecture: str) -> str:
        """Where a supported architecture comes from, for messages."""
        if architecture in self._registered:
            return f"registered by a plugin as {_name(self._registered[architecture])}"
        return f"{ARCHITECTURES[architecture].family}, a built-in family"

    def find(self, hf_config: dict[str, Any]) -> str | None:
        """The first of the config's `architectures` that is supported."""
        supported = self.get_supported_archs()
        return next((name for name in hf_config.get("architectures") or () if name in supported), None)

    def resolve(self, hf_config: dict[str, Any]) -> "type[DecoderModel]":
        """The class for that architecture. ValueError that lists the supported ones if there is none."""
        name = self.find(hf_config)
        if name is None:
            raise ValueError(self.refusal(hf_config))
        model = self._registered.get(name) or f"quire.models.{ARCHITECTURES[name].target}"
        return _imported(name, model) if isinstance(model, str) else model

    def missing(self, hf_config: dict[str, Any]) -> str | None:
        """What a known architecture needs that there is not yet; None: it is not among those."""
        name = next((name for name in hf_config.get("architectures") or () if name in MISSING), None)
        return None if name is None else f"{name} is not supported yet; missing: {MISSING[name]}"

    def refusal(self, hf_config: dict[str, Any]) -> str:
        missing = self.missing(hf_config)
        if missing is not None:
            return missing
        given = ", ".join(hf_config.get("architectures") or ()) or "none is named in the model's config"
        return f"architecture not supported: {given}; supported: {', '.join(self.get_supported_archs())}"


def _name(model: type | str) -> str:
    return model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"


def _imported(architecture: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{architecture} is registered as {target}, which cannot be imported: {error}") from error


# One per process, named as in vLLM.
ModelRegistry = Registry()


def model_class(hf_config: dict[str, Any]) -> "type[DecoderModel]":
    return ModelRegistry.resolve(hf_config)
