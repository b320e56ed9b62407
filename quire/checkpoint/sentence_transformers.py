"""What sentence-transformers' files say of a model: its modules after the transformer, its prompts, its limits."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.checkpoint.json_file import is_readable, read_json
from quire.config.pooling import Dense
from quire.config.shown import shown
from quire.config.values import whole_number

MODULES = "modules.json"
# Flags of a Pooling module's config.
MODES = {"pooling_mode_cls_token": "CLS", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_lasttoken": "LAST"}
OTHER_MODES = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
MODE_NAMES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json")
ORDER = ("Transformer", "LogitScore", "Pooling", "Dense", "Normalize")
MAX_PATH = 128  # characters
MAX_LENGTH = 1 << 30  # tokenizers without a limit name a larger one


@dataclass(frozen=True)
class SentenceModules:
    pooling_type: str | None = None  # None: not one of ours, or no Pooling module
    unknown_pooling: str | None = None  # its name, if it is not one of ours
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    pools: bool = False  # it has a Pooling module
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    dimensions: int | None = None  # of embeddings, unless a request says otherwise
    messages: bool = False  # texts become messages of the model's chat template
    score_tokens: tuple[int, ...] = ()  # of a LogitScore module: yes alone, or no and yes
    activation: str | None = None  # of a cross-encoder's scores: the path of torch's class


def read_modules(folder: Path) -> SentenceModules | None:
    """None if the folder has no modules.json."""
    file = folder / MODULES
    if not is_readable(file):
        return None
    try:
        modules = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ValueError(f"{file} must hold a list of modules")
    pooling: dict[str, Any] | None = None
    dense: list[Dense] = []
    score_tokens: tuple[int, ...] = ()
    kinds: list[str] = []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        if Path(path).is_absolute() or ".." in Path(path).parts or len(path) > MAX_PATH:
            raise ValueError(f"{file}: the path {shown(path)} is not in the model's folder")
        if kind == "Pooling":
            pooling = read_json(folder / path / "config.json") or {}
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind == "LogitScore":
            score_tokens = _score_tokens(folder / path / "config.json")
        elif kind not in ("Transformer", "Normalize", "Dropout"):
            raise ValueError(f"{file} has the module {shown(kind)}; allowed: {', '.join(ORDER)}")
        kinds += [kind] if kind in ORDER else []
    if kinds != sorted(kinds, key=ORDER.index):
        raise ValueError(f"{file} has {', '.join(kinds)}; available is the order {', '.join(ORDER)}")
    name, unknown = _pooling_type(pooling) if pooling is not None else (None, None)
    texts = read_json(folder / "config_sentence_transformers.json") or {}
    prompts = texts.get("prompts") if pooling is None or pooling.get("include_prompt") is not False else None
    kept = {key: text for key, text in _object(prompts).items() if isinstance(text, str)}
    default = texts.get("default_prompt_name")
    dimensions = texts.get("truncate_dim")
    transformer = _transformer_config(folder)
    activation = texts.get("activation_fn")
    return SentenceModules(
        name,
        unknown,
        tuple(dense),
        "Normalize" in kinds,
        pooling is not None,
        kept,
        default if isinstance(default, str) and default in kept else None,
        _max_length(folder, transformer),
        None if dimensions is None else whole_number("truncate_dim of config_sentence_transformers.json", dimensions),
        "message" in _object(transformer.get("modality_config")),
        score_tokens,
        activation if isinstance(activation, str) and activation.startswith("torch.") else None,
    )


def _pooling_type(config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Ours, and the name of one that is none of ours."""
    named = config.get("pooling_mode")
    if isinstance(named, list):
        named = " and ".join(map(str, named))
    if isinstance(named, str):
        return MODE_NAMES.get(named), None if named in MODE_NAMES else named
    found = [name for name in (*MODES, *OTHER_MODES) if config.get(name)]
    if len(found) == 1 and found[0] in MODES:
        return MODES[found[0]], None
    return (None, " and ".join(found)) if found else ("MEAN", None)  # their default


def _dense(folder: Path, path: str) -> Dense:
    config = read_json(folder / path / "config.json") or {}
    activation = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    files = [name for name in ("model.safetensors", "pytorch_model.bin") if (folder / path / name).is_file()]
    if not files:
        raise ValueError(f"{folder / path} has no model.safetensors; the Dense module of {MODULES} needs its weights")
    width = config.get("out_features")
    checked = None if width is None else whole_number(f"{folder / path}: out_features", width)
    return Dense(f"{path}/{files[0]}", "linear.", activation, checked)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _score_tokens(file: Path) -> tuple[int, ...]:
    config = read_json(file) or {}
    names = ("false_token_id", "true_token_id") if config.get("false_token_id") is not None else ("true_token_id",)
    return tuple(whole_number(f"{file}: {name}", config.get(name), minimum=0) for name in names)


def _transformer_config(folder: Path) -> dict[str, Any]:
    found = (read_json(folder / name) for name in TRANSFORMER_FILES)
    return next((config for config in found if config), {})


def _max_length(folder: Path, transformer: dict[str, Any]) -> int | None:
    """The tokenizer's, where the model has none of its own."""
    given = transformer.get("max_seq_length")
    if given is not None:
        return whole_number(f"{folder}: max_seq_length", given)
    length = (read_json(folder / "tokenizer_config.json") or {}).get("model_max_length")
    return length if type(length) is int and 1 <= length < MAX_LENGTH else None
