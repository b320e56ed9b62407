"""Finds what a model is for, from its architecture, its files and the user's options. Needs no torch."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.checkpoint.sentence_transformers import SentenceModules, read_modules
from quire.config.pooling import (
    CLASSIFY,
    EMBED,
    TOKEN_CLASSIFY,
    TOKEN_EMBED,
    Dense,
    PoolingConfig,
    PoolingSetup,
)
from quire.config.shown import shown
from quire.pooling.registry import find_pooling_type

GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
CAUSAL = ("ForCausalLM", "LMHeadModel")
# Ends of architectures' names, with the kind of result.
CLASSIFIERS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "step",
    "ForRewardModel": "reward",
}
EMBEDDERS = ("ForMaskedLM", "EmbeddingModel", "ForTextEncoding", "Model")
COLBERT = ("HF_ColBERT", "ColBERT")
# Of BGE-M3, beside the model's own file.
COLBERT_LINEAR, SPARSE_LINEAR = "colbert_linear.pt", "sparse_linear.pt"
ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
MAX_LABELS = 1 << 20
PROBLEMS = {
    "regression": "identity",
    "single_label_classification": None,  # by the number of classes
    "multi_label_classification": "sigmoid",
}


def resolve_pooling(
    folder: Path,
    hf_config: dict[str, Any],
    options: PoolingConfig,
    supported: Collection[str],
    token_id: Callable[[str], int | None],
) -> tuple[PoolingSetup | None, dict[str, Any], int | None]:
    """The setup, or None if the model generates; the config of the model to load, whose architecture is one of
    `supported` where there is such a one; and the longest input by sentence-transformers' files. `token_id` is the id
    of a token's text."""
    modules = read_modules(folder) if folder.is_dir() else None
    name = next(iter(hf_config.get("architectures") or ()), "")
    kind = _kind(name, hf_config, modules, options)
    if kind is None:
        return None, hf_config, None
    setup = _SETUPS[kind](folder, hf_config, modules)
    tokens = hf_config.get("classifier_from_token")
    if hf_config.get("is_original_qwen3_reranker"):
        tokens = tokens or ["no", "yes"]
    if tokens is None and modules is not None and modules.score_tokens:
        tokens = modules.score_tokens
    if kind == "classify" and tokens is not None:
        setup = _from_tokens(setup, hf_config, modules, tokens, token_id)
    backbone = _backbone(name, hf_config, supported, reads_head=setup.head == "tokens")
    if setup.head == "checkpoint" and name.endswith(GENERATING):
        if kind != "reward":
            raise ValueError(
                f"{name} has no head for classes; name the tokens that stand for them: "
                """--hf-overrides '{"classifier_from_token": ["no", "yes"]}'"""
            )
        setup = replace(setup, head=None, num_labels=0)
    elif setup.head == "checkpoint" and backbone is hf_config:
        setup = replace(setup, head="model")  # one of our classes has it
    if next(iter(backbone.get("architectures") or ()), "").endswith(CAUSAL):
        setup = replace(setup, pooling_type=setup.pooling_type or "LAST")
    setup = _with_options(setup, options.pooler_config or {})
    return setup, backbone, modules.max_length if modules is not None else None


def _kind(name: str, hf_config: dict[str, Any], modules: SentenceModules | None, options: PoolingConfig) -> str | None:
    """embed, classify, reward, ...; None: it generates."""
    if options.runner == "generate":
        return None
    own = next((kind for end, kind in CLASSIFIERS.items() if name.endswith(end)), None)
    if options.convert in ("embed", "classify", "reward"):
        return options.convert if own is None or options.convert == "embed" else own
    if own is not None:
        return own
    if name.startswith(COLBERT):
        return "colbert"
    if hf_config.get("classifier_from_token") is not None or hf_config.get("is_original_qwen3_reranker"):
        return "classify"
    if modules is not None and modules.score_tokens:
        return "classify"
    if modules is not None and (modules.pools or modules.dense):
        return "embed" if modules.pools else "colbert"
    if name.endswith(EMBEDDERS) and not name.endswith(GENERATING):
        return "embed"
    return "embed" if options.runner == "pooling" else None


def _embed(folder: Path, hf_config: dict[str, Any], modules: SentenceModules | None) -> PoolingSetup:
    setup = PoolingSetup(EMBED, (EMBED, TOKEN_EMBED), matryoshka=_matryoshka(hf_config))
    if modules is not None:
        if modules.unknown_pooling is not None:
            raise ValueError(
                f"the model's Pooling module is {modules.unknown_pooling}; available are CLS, MEAN and LAST: set one "
                """with --pooler-config '{"pooling_type": "MEAN"}', which gives other vectors"""
            )
        setup = replace(
            setup,
            pooling_type=modules.pooling_type,
            dense=modules.dense,
            normalize=modules.normalize,
            dimensions=modules.dimensions,
            matryoshka=setup.matryoshka or modules.dimensions is not None,
            prompts=tuple(modules.prompts.items()),
            default_prompt=modules.default_prompt,
            messages=modules.messages,
        )
    instructions = hf_config.get("task_instructions")
    if not setup.prompts and isinstance(instructions, dict):
        kept = ((name, text) for name, text in instructions.items() if isinstance(text, str))
        setup = replace(setup, prompts=tuple(kept))
    if (folder / SPARSE_LINEAR).is_file() and (folder / COLBERT_LINEAR).is_file():
        setup = replace(
            setup,
            tasks=(EMBED, TOKEN_EMBED, TOKEN_CLASSIFY),
            pooling_type=setup.pooling_type or "CLS",
            token_dense=(Dense(COLBERT_LINEAR, ""),),
            sparse=Dense(SPARSE_LINEAR, ""),
            skip_first=(TOKEN_EMBED, TOKEN_CLASSIFY),
            skip_last=(TOKEN_CLASSIFY,),
        )
    return setup


def _colbert(folder: Path, hf_config: dict[str, Any], modules: SentenceModules | None) -> PoolingSetup:
    dense = modules.dense if modules is not None and modules.dense else (Dense("", "linear."),)
    return PoolingSetup(TOKEN_EMBED, (TOKEN_EMBED,), matryoshka=_matryoshka(hf_config), token_dense=dense)


def _classify(folder: Path, hf_config: dict[str, Any], modules: SentenceModules | None) -> PoolingSetup:
    labels = _labels(hf_config)
    return PoolingSetup(
        CLASSIFY,
        (CLASSIFY, TOKEN_CLASSIFY),
        head="checkpoint",
        num_labels=len(labels),
        labels=labels,
        activation=_activation(hf_config, len(labels), modules),
        messages=modules is not None and modules.messages,
        instruction=modules.prompts.get(modules.default_prompt or "") if modules is not None else None,
    )


def _token_classify(folder: Path, hf_config: dict[str, Any], modules: SentenceModules | None) -> PoolingSetup:
    labels = _labels(hf_config)
    activation = _activation(hf_config, len(labels), modules)
    return PoolingSetup(
        TOKEN_CLASSIFY,
        (TOKEN_CLASSIFY,),
        head="checkpoint",
        num_labels=len(labels),
        labels=labels,
        activation=activation,
    )


def _reward(folder: Path, hf_config: dict[str, Any], modules: SentenceModules | None) -> PoolingSetup:
    """Rewards are numbers of any size, for each token."""
    return PoolingSetup(TOKEN_CLASSIFY, (TOKEN_CLASSIFY,), head="checkpoint", activation="identity", num_labels=1)


def _step(folder: Path, hf_config: dict[str, Any], modules: SentenceModules | None) -> PoolingSetup:
    """Probabilities that steps of a solution are right."""
    return replace(_reward(folder, hf_config, modules), activation="softmax", num_labels=2, token_pooling_type="STEP")


_SETUPS = {
    "embed": _embed,
    "colbert": _colbert,
    "classify": _classify,
    "token_classify": _token_classify,
    "reward": _reward,
    "step": _step,
}


def _from_tokens(
    setup: PoolingSetup,
    hf_config: dict[str, Any],
    modules: SentenceModules | None,
    tokens: Any,
    token_id: Callable[[str], int | None],
) -> PoolingSetup:
    """Classes are tokens that the model would generate, as of Qwen3-Reranker."""
    if not isinstance(tokens, list | tuple) or not tokens:
        raise ValueError(f"classifier_from_token is {shown(tokens)}; it must be a list of tokens")
    ids = []
    for token in tokens:
        found = token if type(token) is int else token_id(token) if isinstance(token, str) else None
        if found is None or found < 0:
            raise ValueError(f"classifier_from_token has {shown(token)}, which is no token of the model")
        ids.append(found)
    two_way = hf_config.get("method") == "from_2_way_softmax" or bool(hf_config.get("is_original_qwen3_reranker"))
    two_way = two_way or (modules is not None and tokens is modules.score_tokens and len(ids) == 2)
    if two_way and len(ids) != 2:
        raise ValueError(f"classifier_from_token has {len(ids)} tokens; from_2_way_softmax needs two: no and yes")
    count = 1 if two_way else len(ids)
    labels = setup.labels if len(setup.labels) == count else tuple(f"LABEL_{i}" for i in range(count))
    return replace(
        setup,
        head="tokens",
        head_tokens=tuple(ids),
        two_way=two_way,
        num_labels=count,
        labels=labels,
        activation=_activation(hf_config, count, modules),
        pairs=bool(hf_config.get("use_sep_token", False)),
    )


def _with_options(setup: PoolingSetup, given: dict[str, Any]) -> PoolingSetup:
    task = given.get("task", setup.task)
    if task not in setup.tasks:
        raise ValueError(f"pooler_config: task is {task!r}; the model can {', '.join(setup.tasks)} (--pooler-config)")
    if "seq_pooling_type" in given:
        find_pooling_type(given["seq_pooling_type"])
    if given.get("dimensions") is not None and setup.matryoshka is False:
        raise ValueError(_not_matryoshka(given["dimensions"]))
    returned = tuple(given.get("returned_token_ids", ()))
    if returned and setup.head is None:
        # Columns of the vocabulary: what the model would say at a step.
        setup = replace(setup, head="tokens", head_tokens=returned, num_labels=len(returned), activation="softmax")
        returned = ()
    pooling_type = given.get("seq_pooling_type", setup.pooling_type)
    return replace(
        setup,
        task=task,
        pooling_type=pooling_type,
        token_pooling_type=given.get("tok_pooling_type", setup.token_pooling_type),
        use_activation=given.get("use_activation"),
        dimensions=given.get("dimensions", setup.dimensions),
        chunked=given.get("enable_chunked_processing", False),
        max_embed_len=given.get("max_embed_len"),
        logit_mean=float(given.get("logit_mean", 0.0)),
        logit_sigma=float(given.get("logit_sigma", 1.0)),
        step_tag_id=given.get("step_tag_id"),
        returned_token_ids=returned,
    )


def _not_matryoshka(dimensions: int) -> str:
    return (
        f"dimensions is {dimensions}, but the model is not trained for shorter embeddings (Matryoshka); leave it out, "
        """or start with --hf-overrides '{"is_matryoshka": true}'"""
    )


def _matryoshka(hf_config: dict[str, Any]) -> tuple[int, ...] | bool:
    listed = hf_config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed and all(type(one) is int for one in listed):
        return tuple(listed)
    return bool(hf_config.get("is_matryoshka", False))


def _labels(hf_config: dict[str, Any]) -> tuple[str, ...]:
    """In their order; transformers' default is two."""
    named = hf_config.get("id2label")
    count = hf_config.get("num_labels", len(named) if isinstance(named, dict) and named else 2)
    if type(count) is not int or not 1 <= count <= MAX_LABELS:
        raise ValueError(
            f"the model's config has num_labels {shown(count)}; it must be a whole number from 1 to {MAX_LABELS}"
        )
    given = named if isinstance(named, dict) else {}
    return tuple(str(given.get(str(i), given.get(i, f"LABEL_{i}"))) for i in range(count))


def _activation(hf_config: dict[str, Any], num_labels: int, modules: SentenceModules | None) -> str:
    """As the checkpoint says it, in one of several ways; else by the number of classes."""
    sentence = hf_config.get("sentence_transformers")
    named = sentence.get("activation_fn") if isinstance(sentence, dict) else None
    named = named or (modules.activation if modules is not None else None)
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named is not None:
        function = str(named).rpartition(".")[2]
        if function not in ACTIVATIONS:
            raise ValueError(f"the model's activation is {shown(named)}; allowed: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[function]
    by_problem = PROBLEMS.get(str(hf_config.get("problem_type")))
    return by_problem or ("sigmoid" if num_labels < 2 else "softmax")


def _backbone(name: str, hf_config: dict[str, Any], supported: Collection[str], reads_head: bool) -> dict[str, Any]:
    """The config with the architecture of the model to load: a decoder's is that of its causal model, without need of
    a head."""
    ends = (*CLASSIFIERS, *EMBEDDERS)
    if name in supported or not name:
        return hf_config
    if name.startswith(COLBERT):
        return hf_config | {"architectures": ["BertModel"]}
    stem = next((name.removesuffix(end) for end in ends if name.endswith(end)), name)
    causal = next((stem + end for end in CAUSAL if stem + end in supported), None)
    if causal is None:
        return hf_config | {"architectures": [f"{stem}Model"]} if f"{stem}Model" in supported else hf_config
    # A head that is not read need not be in the checkpoint.
    tied = hf_config.get("tie_word_embeddings", False) if reads_head else True
    return hf_config | {"architectures": [causal], "tie_word_embeddings": tied}
