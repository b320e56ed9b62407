"""An encoder's shape and its differences from the shared decoder, read from a Hugging Face config."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.config.values import whole_number
from quire.models.decoder_config import DecoderConfig

MAX_TOKEN_TYPES = 8  # as many as a token id has bits for (models/base.py, TOKEN_TYPE_SHIFT)
MAX_LABELS = 2**20
MAX_BUCKETS = 2**16

Task = Literal["sequence", "token"]
TASKS: dict[str, Task] = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}


@dataclass(frozen=True)
class EncoderConfig(DecoderConfig):
    causal: bool = False
    norm: Literal["rms", "layer"] = "layer"
    norm_bias: bool = True
    pre_norm: bool = False
    sum_norm: bool = True  # of the stream and a block's output, as in BERT; else the last layer's output is normed

    # Embedding
    num_token_types: int = 0
    embedding_norm: bool = True
    first_norm: bool = True  # False: where there are norms before blocks, the first layer has none before attention

    # Attention
    num_buckets: int = 0  # of distances, each with a bias by head that all layers share; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("type_vocab_size", self.num_token_types, minimum=0, maximum=MAX_TOKEN_TYPES)
        whole_number("relative_attention_num_buckets", self.num_buckets, minimum=0, maximum=MAX_BUCKETS)


@dataclass(frozen=True)
class HeadConfig:
    """From the hidden states of some tokens to logits: maybe dense, activation and norm, then the labels' weights."""

    pooling: str  # which tokens, as SupportsPooling.head_pooling
    dense: bool = False
    dense_bias: bool = True
    activation: str = "tanh"
    norm: bool = False


def task_of(hf: dict[str, Any]) -> Task | None:
    """What the checkpoint has a head for; None: for nothing that we use."""
    names = hf.get("architectures") or ()
    return next((task for name in names for suffix, task in TASKS.items() if str(name).endswith(suffix)), None)


def num_labels(hf: dict[str, Any]) -> int:
    labels = hf.get("id2label")
    count = hf.get("num_labels") or (len(labels) if isinstance(labels, dict) else 2)
    return whole_number("num_labels", count, maximum=MAX_LABELS)
