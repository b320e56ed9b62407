"""Options of models that pool, and what is known of such a model once its files are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.fields import internal, option, validate
from quire.config.shown import shown
from quire.config.values import whole_number

RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed", "classify", "reward")
EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY = TASKS = ("embed", "classify", "token_embed", "token_classify")
TOKEN_TASKS = (TOKEN_EMBED, TOKEN_CLASSIFY)  # a result for each token
TOKEN_POOLING = ("ALL", "STEP")
REMOVED_TASKS = {"score": CLASSIFY, "encode": f"{TOKEN_EMBED} or {TOKEN_CLASSIFY}"}  # vLLM's former names

# What a user may say of a model's pooler, as in vLLM: the name and the types of its value.
POOLER_KEYS: dict[str, tuple[type, ...]] = {
    "task": (str,),
    "pooling_type": (str,),
    "seq_pooling_type": (str,),
    "tok_pooling_type": (str,),
    "use_activation": (bool,),
    "normalize": (bool,),  # a former name of use_activation
    "dimensions": (int,),
    "enable_chunked_processing": (bool,),
    "max_embed_len": (int,),
    "logit_mean": (int, float),
    "logit_sigma": (int, float),
    "step_tag_id": (int,),
    "returned_token_ids": (list, tuple),
}


@dataclass(frozen=True)
class Dense:
    """A linear layer on pooled vectors, in files of its own."""

    file: str  # in the model's folder
    prefix: str  # of the names of its tensors
    activation: str = "Identity"  # torch.nn's
    width: int | None = None  # of its outputs, where a config says


@dataclass(frozen=True)
class PoolingSetup:
    """What a model is served for, by its files and the user's options."""

    task: str  # of requests that name none
    tasks: tuple[str, ...]
    pooling_type: str | None = None  # of one vector for a prompt; None: the model's own default
    token_pooling_type: str = "ALL"
    normalize: bool = True  # embeddings have length 1, unless the request says otherwise
    use_activation: bool | None = None  # the user's default
    activation: str = "softmax"  # of classes: softmax, sigmoid or identity
    dimensions: int | None = None  # the user's default
    matryoshka: tuple[int, ...] | bool = True  # dimensions to which embeddings may be cut; True: any
    dense: tuple[Dense, ...] = ()  # of embeddings
    token_dense: tuple[Dense, ...] = ()  # of the embeddings of tokens
    sparse: Dense | None = None  # a weight for each token: lexical weights
    head: str | None = None  # of classes: "checkpoint", "tokens" (rows of the LM head), "model" (its own), or none
    head_tokens: tuple[int, ...] = ()
    two_way: bool = False  # of two tokens: the score is the difference of their logits
    skip_first: tuple[str, ...] = ()  # tasks that leave out the first token, and the last
    skip_last: tuple[str, ...] = ()
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    chunked: bool = False  # longer inputs are split, and their embeddings averaged
    max_embed_len: int | None = None
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    pairs: bool = True  # a cross-encoder's two texts are joined by separators
    prompts: tuple[tuple[str, str], ...] = ()  # put before texts, by name
    default_prompt: str | None = None
    messages: bool = False  # the model's chat template makes prompts: of texts to embed, of pairs to score
    instruction: str | None = None  # the first message of such a pair, unless the request has one

    @property
    def prompt_by_name(self) -> dict[str, str]:
        return dict(self.prompts)

    @property
    def score_type(self) -> str | None:
        """How pairs are scored, in vLLM's words; None: they cannot be."""
        if CLASSIFY in self.tasks:
            return "cross-encoder" if self.num_labels == 1 else None
        return "late-interaction" if self.task == TOKEN_EMBED else "bi-encoder" if EMBED in self.tasks else None


@dataclass
class PoolingConfig:
    """Models that pool: embeddings, scores, classes."""

    runner: str = option(
        "auto", "what the model is for: auto: by its files; pooling: vectors, scores or classes", choices=RUNNERS
    )
    convert: str = option(
        "auto", "make a model that generates one that embeds, classifies or rewards", choices=CONVERTS
    )
    pooler_config: dict[str, Any] | None = option(
        None, 'how hidden states become vectors, as JSON: {"pooling_type": "MEAN", "use_activation": false}'
    )

    setup: PoolingSetup | None = internal()  # None: the model generates

    def __post_init__(self) -> None:
        if isinstance(self.pooler_config, Mapping) or hasattr(self.pooler_config, "__dict__"):
            self.pooler_config = read_pooler(self.pooler_config) or None
        elif self.pooler_config is not None:
            raise ValueError(f"pooler_config is {shown(self.pooler_config)}; it must be an object (--pooler-config)")
        validate(self)
        if self.runner == "generate" and self.convert not in ("auto", "none"):
            raise ValueError(f"convert is {self.convert!r}, which is for runner 'pooling' (--convert, --runner)")


def read_pooler(given: Any) -> dict[str, Any]:
    """The keys with a value, checked; `pooling_type` under the name of its kind."""
    values = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    found = {key: value for key, value in values.items() if value is not None}
    for key, value in found.items():
        if key not in POOLER_KEYS:
            raise ValueError(f"pooler_config has {shown(key)}; allowed: {', '.join(POOLER_KEYS)} (--pooler-config)")
        kinds = POOLER_KEYS[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"pooler_config: {key} is {shown(value)}; it must be of type {allowed} (--pooler-config)")
    for key, low in (("dimensions", 1), ("max_embed_len", 1), ("step_tag_id", 0)):
        if key in found:
            whole_number(f"pooler_config: {key}", found[key], minimum=low)
    for token in found.get("returned_token_ids", ()):
        whole_number("pooler_config: returned_token_ids", token, minimum=0)
    if found.get("logit_sigma") == 0:
        raise ValueError("pooler_config: logit_sigma is 0; it divides, and must be another number")
    if "normalize" in found:
        found["use_activation"] = found.pop("normalize")
    if "pooling_type" in found:
        name = found.pop("pooling_type").upper()
        kind = "tok_pooling_type" if name in TOKEN_POOLING else "seq_pooling_type"
        if kind in found:
            raise ValueError(f"pooler_config has pooling_type and {kind}; give one of them")
        found[kind] = name
    for kind in ("seq_pooling_type", "tok_pooling_type"):
        if kind in found:
            found[kind] = found[kind].upper()
    if found.get("tok_pooling_type", "ALL") not in TOKEN_POOLING:
        raise ValueError(f"pooler_config: tok_pooling_type is {found['tok_pooling_type']!r}; allowed: ALL, STEP")
    if found.get("task") in REMOVED_TASKS:
        raise ValueError(f"pooler_config: task {found['task']!r} is now {REMOVED_TASKS[found['task']]}")
    if found.get("task", EMBED) not in TASKS:
        raise ValueError(f"pooler_config: task is {shown(found['task'])}; allowed: {', '.join(TASKS)}")
    return found
