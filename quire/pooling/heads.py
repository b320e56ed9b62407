"""What comes after pooling: Dense layers of embeddings, heads of classes, norms and activations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import CheckpointTensor, open_tensors, read_part
from quire.config import EngineConfig
from quire.config.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, Dense, PoolingSetup
from quire.config.shown import shown
from quire.pooling.inputs import hidden_size

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
}
CLASS_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "identity": lambda logits: logits,
}
HEAD_PREFIXES = ("score.", "classifier.", "v_head.")
LM_HEADS = ("lm_head.weight",)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
MAX_HEAD_NUMBERS = 1 << 30


class Linear:
    """In float32, whatever the model computes in: heads are small."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "Identity") -> None:
        self.weight, self.bias = weight, bias
        self.activation = ACTIVATIONS[activation]

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.activation(F.linear(vectors, self.weight, self.bias))


Layers = Sequence[Callable[[torch.Tensor], torch.Tensor]]


@dataclass
class Heads:
    """By task, what makes a result of pooled hidden states. Without files, hidden states are the embeddings."""

    setup: PoolingSetup | None = None
    default_pooling: str = "LAST"
    head_pooling: str | None = None  # of classes, where the model's own head says so
    layers: dict[str, Layers] = field(default_factory=dict)

    def pooling_type(self, task: str) -> str:
        """Of requests that name none."""
        return (self.head_pooling if task == CLASSIFY else None) or self.default_pooling

    def finish(
        self, vectors: torch.Tensor, task: str, dimensions: int | None, activation: bool, columns: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """[n, hidden] float32 -> [n, dimensions or classes]."""
        for layer in self.layers.get(task, ()):
            vectors = layer(vectors)
        if task in (EMBED, TOKEN_EMBED):
            # Shortened first: what is left is what has length 1.
            vectors = vectors if dimensions is None else vectors[:, :dimensions]
            return F.normalize(vectors, dim=1) if activation else vectors.contiguous()
        setup = self.setup
        if columns:
            vectors = vectors[:, list(columns)]
        if setup is None or not activation:
            return vectors.contiguous()
        if setup.sparse is not None:
            return torch.relu(vectors)
        scaled = (
            (vectors - setup.logit_mean) / setup.logit_sigma if setup.logit_sigma != 1 or setup.logit_mean else vectors
        )
        return CLASS_ACTIVATIONS[setup.activation](scaled)


def load_heads(config: EngineConfig, checkpoint: Checkpoint, model: Any, device: torch.device) -> Heads:
    """Of a loaded model. Dummy checkpoints get heads of random numbers."""
    setup = config.pooling.setup
    own = model if hasattr(model, "default_pooling") else None
    if not getattr(model, "supports_generation", True) and (setup is None or config.speculative.num_drafts):
        raise ValueError(
            f"{type(model).__name__} gives vectors or classes, no text: serve it with runner pooling, without drafts "
            "(--runner, --speculative-config)"
        )
    heads = Heads(setup)
    if own is not None:
        heads.default_pooling = own.default_pooling
        heads.head_pooling = getattr(own, "head_pooling", None)
        if heads.head_pooling == "ALL":
            heads.head_pooling = None
    if setup is None:
        return heads
    reader = HeadReader(checkpoint, device, hidden_size(config.model.hf_config) or 0)
    heads.layers[EMBED] = [reader.dense(one) for one in setup.dense]
    heads.layers[TOKEN_EMBED] = [reader.dense(one) for one in setup.token_dense]
    if setup.sparse is not None:
        heads.layers[TOKEN_CLASSIFY] = [reader.dense(setup.sparse)]
    if setup.head == "checkpoint":
        layers: Layers = reader.head(setup.num_labels)
    elif setup.head == "tokens":
        layers = [reader.tokens(setup.head_tokens, setup.two_way)]
    elif setup.head == "model":
        if own is None or getattr(own, "num_labels", 0) == 0:
            raise ValueError(f"{type(model).__name__} has no head for classes; it can embed (--convert embed)")
        layers = [own.classify]
    else:
        return heads
    heads.layers[CLASSIFY] = heads.layers[TOKEN_CLASSIFY] = layers
    return heads


class HeadReader:
    """Reads heads from the checkpoint, which the model's loader leaves out."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, width: int) -> None:
        self.checkpoint, self.device, self.width = checkpoint, device, width
        self.generator = torch.Generator().manual_seed(0) if checkpoint.format == "dummy" else None

    def dense(self, module: Dense) -> Linear:
        if module.activation not in ACTIVATIONS:
            raise ValueError(
                f"the activation of {module.file} is {shown(module.activation)}; allowed: {', '.join(ACTIVATIONS)}"
            )
        if self.generator is not None and not module.file:
            return self._random(self.width)
        found = dict(self._dense_tensors(module))
        if "weight" not in found:
            raise ValueError(f"{self.checkpoint.path / module.file} has no {module.prefix}weight")
        return Linear(found["weight"], found.get("bias"), module.activation)

    def _dense_tensors(self, module: Dense) -> Iterator[tuple[str, torch.Tensor]]:
        if not module.file:
            for tensor in open_tensors(self.checkpoint):
                if tensor.name.startswith(module.prefix):
                    yield tensor.name.removeprefix(module.prefix), self._read(tensor)
            return
        path = self.checkpoint.path / module.file
        for name, value in _load_file(path).items():
            yield name.removeprefix(module.prefix), value.float().to(self.device)

    def head(self, num_labels: int) -> Layers:
        """One linear layer, or several with ReLU between them."""
        if self.generator is not None:
            return [self._random(num_labels)]
        found: dict[str, torch.Tensor] = {}
        for tensor in open_tensors(self.checkpoint):
            prefix = next((one for one in HEAD_PREFIXES if tensor.name.startswith(one)), None)
            if prefix is not None:
                found[tensor.name.removeprefix(prefix)] = self._read(tensor)
        weights = sorted(name for name in found if name.endswith("weight"))
        if not weights:
            raise ValueError(
                f"the checkpoint has no head for classes: no tensor begins with {', '.join(HEAD_PREFIXES)}"
            )
        layers = [Linear(found[name], found.get(f"{name.removesuffix('weight')}bias")) for name in weights]
        for layer in layers[:-1]:
            layer.activation = torch.relu
        if len(layers[-1].weight) != num_labels:
            raise ValueError(
                f"the head has {len(layers[-1].weight)} outputs, but the model's config {num_labels} labels"
            )
        return layers

    def tokens(self, token_ids: Sequence[int], two_way: bool) -> Linear:
        """Rows of the LM head; of the embedding where it is tied to that."""
        rows = self._random(len(token_ids)).weight if self.generator is not None else self._rows(token_ids)
        return Linear(rows[1:] - rows[:1] if two_way else rows)

    def _rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        tensors = {
            tensor.name: tensor
            for tensor in open_tensors(self.checkpoint)
            if tensor.name.endswith(LM_HEADS + EMBEDDINGS)
        }
        found = next((t for end in LM_HEADS + EMBEDDINGS for name, t in tensors.items() if name.endswith(end)), None)
        if found is None:
            raise ValueError("the checkpoint has neither lm_head.weight nor an embedding to read tokens of")
        if max(token_ids) >= found.shape[0]:
            raise ValueError(f"token {max(token_ids)} is out of vocabulary: the model has {found.shape[0]} ids")
        rows = torch.empty(len(token_ids), found.shape[1])
        for at, token in enumerate(token_ids):
            read_part(found, rows[at : at + 1], 0, token)
        return rows.to(self.device)

    def _read(self, tensor: CheckpointTensor) -> torch.Tensor:
        if torch.Size(tensor.shape).numel() > MAX_HEAD_NUMBERS:
            raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}, which is no head")
        read = torch.empty(tensor.shape)
        tensor.read_into(read)
        return read.to(self.device)

    def _random(self, rows: int) -> Linear:
        return Linear((torch.randn(rows, self.width, generator=self.generator) * 0.02).to(self.device))


def _load_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold tensors by name")
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
