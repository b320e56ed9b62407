"""Scores of pairs of texts: by a cross-encoder, by the angle of embeddings, or by the nearest tokens of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.config.pooling import CLASSIFY, EMBED, TOKEN_EMBED, PoolingSetup
from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.pooling.inputs import ALL, PoolingInputs, Truncation
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput

if TYPE_CHECKING:
    from quire.entrypoints.chat_renderer import ChatRenderer

TASKS = {"cross-encoder": CLASSIFY, "bi-encoder": EMBED, "late-interaction": TOKEN_EMBED}
TEXT_PART = "text"
MAX_PRODUCTS = 1 << 24  # of tokens, at a time


@dataclass
class Pairs:
    """One query for all documents, or one for each."""

    queries: list[str]
    documents: list[str]

    @classmethod
    def of(cls, queries: Any, documents: Any, names: tuple[str, str] = ("queries", "documents")) -> "Pairs":
        pairs = cls(_texts(queries, names[0]), _texts(documents, names[1]))
        for name, given in zip(names, (pairs.queries, pairs.documents), strict=True):
            if not given:
                raise ValueError(f"{name} is empty; at least one text is needed")
        if len(pairs.queries) not in (1, len(pairs.documents)):
            raise ValueError(
                f"{names[0]} has {len(pairs.queries)} texts and {names[1]} {len(pairs.documents)}; input lengths must "
                "be either 1:1, 1:N or N:N"
            )
        return pairs

    @property
    def num_chars(self) -> int:
        repeated = len(self.documents) if len(self.queries) == 1 else 1
        return repeated * sum(map(len, self.queries)) + sum(map(len, self.documents))

    def both(self) -> list[tuple[str, str]]:
        queries = self.queries if len(self.queries) > 1 else self.queries * len(self.documents)
        return list(zip(queries, self.documents, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    return [text_of(one, name) for one in (given if isinstance(given, list | tuple) else [given])]


def text_of(given: Any, name: str) -> str:
    """A string, an object with a text, or one with parts of text."""
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        parts = given.get("content", given.get(TEXT_PART))
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
            return "\n".join(part["text"] for part in parts)
    raise ValueError(f"{name} has {shown(given)}; it must be a text, or an object with one")


@dataclass(frozen=True)
class ScoreOptions:
    cut: Truncation = ALL
    max_query: int = 0  # tokens; 0: all
    max_document: int = 0
    template: str | None = None  # Jinja text that makes one prompt of both texts, instead of the model's own
    template_kwargs: Mapping[str, Any] | None = None
    max_chars: int | None = None  # of all pairs


def score_type(setup: PoolingSetup | None) -> str:
    found = setup.score_type if setup is not None else None
    if found is None:
        why = "it generates" if setup is None else f"it can {', '.join(setup.tasks)} with {setup.num_labels} classes"
        raise ValueError(
            f"this model does not score pairs: {why}; one that embeds does, or a classifier of one class (num_labels 1)"
        )
    return found


def score_prompts(
    inputs: PoolingInputs, pairs: Pairs, options: ScoreOptions, renderer: "ChatRenderer | None"
) -> list[ParsedPrompt]:
    """A prompt for each pair for a cross-encoder, else one for each query and document. `renderer`: where a template
    makes the prompts of pairs."""
    for name, most in (("max_tokens_per_query", options.max_query), ("max_tokens_per_doc", options.max_document)):
        if not 0 <= most < inputs.longest:
            raise ValueError(f"{name} is {most}; it must be from 0 to less than max_model_len {inputs.longest}")
    pairs = Pairs(
        inputs.shortened(pairs.queries, options.max_query), inputs.shortened(pairs.documents, options.max_document)
    )
    if score_type(inputs.setup) != "cross-encoder":
        query, document = _prompts_of_sides(inputs)
        return [
            *inputs.texts(pairs.queries, cut=options.cut, prefix=query),
            *inputs.texts(pairs.documents, cut=options.cut, prefix=document),
        ]
    # A query that all documents share is tokenized with each of them.
    count = pairs.num_chars
    if options.max_chars is not None and count > options.max_chars:
        raise ValueError(
            f"the pairs have {count} characters, the query's with each document; at most {options.max_chars} are "
            "tokenized (--max-request-bytes)"
        )
    if renderer is None:
        return inputs.pairs(pairs.both(), options.cut)
    first = _first_messages(inputs.setup, options)

    def rendered(query: str, document: str) -> str:
        return renderer.render(
            [*first, {"role": "query", "content": query}, {"role": "document", "content": document}],
            chat_template=options.template,
            add_generation_prompt=False,
            template_kwargs=options.template_kwargs,
        )

    around = rendered("", "") if options.cut.keep is not None else ""
    return inputs.texts([rendered(*pair) for pair in pairs.both()], special=False, cut=options.cut, around=around)


def by_template(setup: PoolingSetup | None, options: ScoreOptions) -> bool:
    """Whether a chat template makes the prompts of pairs."""
    return options.template is not None or (setup is not None and setup.messages)


def _first_messages(setup: PoolingSetup | None, options: ScoreOptions) -> list[dict[str, str]]:
    """sentence-transformers' prompt of a pair is the system's message."""
    if setup is None or not setup.messages:
        return []
    instruction = (options.template_kwargs or {}).get("instruction", setup.instruction)
    return [{"role": "system", "content": str(instruction)}] if instruction else []


def _prompts_of_sides(inputs: PoolingInputs) -> tuple[str, str]:
    """sentence-transformers' prompts for queries and documents, where the model has both names."""
    prompts = inputs.setup.prompt_by_name if inputs.setup is not None else {}
    return (prompts["query"], prompts["document"]) if prompts.keys() >= {"query", "document"} else ("", "")


def scored(
    setup: PoolingSetup | None, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], num_queries: int
) -> list[ScoringRequestOutput]:
    """One for each pair. `outputs` are those of score_prompts, all complete."""
    kind = score_type(setup)
    if kind == "cross-encoder":
        return [_scoring(output, float(output.outputs.data[0])) for output in outputs]
    queries, documents = list(outputs[:num_queries]), outputs[num_queries:]
    queries = queries if len(queries) > 1 else queries * len(documents)
    similarity = _cosine if kind == "bi-encoder" else _max_sim
    return [
        _scoring(document, similarity(query.outputs.data, document.outputs.data), query)
        for query, document in zip(queries, documents, strict=True)
    ]


def _scoring(
    output: PoolingRequestOutput[PoolingOutput], score: float, query: PoolingRequestOutput[PoolingOutput] | None = None
) -> ScoringRequestOutput:
    tokens = output.prompt_token_ids if query is None else query.prompt_token_ids + output.prompt_token_ids
    return ScoringRequestOutput(
        output.request_id, ScoringOutput(score), tokens, output.num_cached_tokens, finish_reason=output.finish_reason
    )


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / max(1e-8, float(np.linalg.norm(one) * np.linalg.norm(other))))


def _max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Late interaction: for each token of the query the nearest of the document, summed."""
    if not len(document):
        return 0.0
    step = max(1, MAX_PRODUCTS // len(document))  # long texts have too many pairs of tokens for one product
    parts = (query[first : first + step] @ document.T for first in range(0, len(query), step))
    return float(sum(part.max(axis=1).sum() for part in parts))
