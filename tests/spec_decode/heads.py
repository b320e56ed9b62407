"""Tiny random draft heads, saved as published ones are, and what they should propose, computed by plain torch."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.attention.group_backends import GroupBackends
from quire.attention.step_batch import StepBatch
from quire.spec_decode.eagle import Eagle3Proposer, EagleProposer
from quire.spec_decode.medusa import MedusaProposer
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.worker.rows import RowState

Module = Callable[[torch.Tensor], torch.Tensor]

PROPOSED: list[tuple[list[int], list[int]]] = []  # known tokens and the drafts behind them, of every proposal


class Noting(Proposer):
    """Notes what is proposed for rows that may decode. Reads the device."""

    def propose(self, step: DraftStep) -> None:
        super().propose(step)
        assert step.num_sampled is not None
        state = step.state
        for row, sampled in zip(step.plan.rows.tolist(), step.num_sampled.tolist(), strict=True):
            known = int(state.num_tokens[row])
            if sampled and known < int(state.token_limit[row]):
                ids = state.token_ids[row, : known + self.num_drafts].tolist()
                PROPOSED.append((ids[:known], ids[known:]))


class NotingMedusa(Noting, MedusaProposer):
    pass


class NotingEagle(Noting, EagleProposer):
    pass


class NotingEagle3(Noting, Eagle3Proposer):
    pass


class NotingEagle3Unrecorded(NotingEagle3):
    """Calls every kernel by itself."""

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        super().initialize(state, backends, last_position)
        self.recorded = None


class NotingEagle3InGraphs(NotingEagle3):
    """Takes the way of captured passes, which read nothing but what is at fixed addresses, without a graph."""

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        super().initialize(state, backends, last_position)
        self.graphs = SimpleNamespace(run=self._run)

    def _run(self, rows: np.ndarray, tokens_per_row: int) -> bool:
        self._compute(torch.from_numpy(rows), tokens_per_row)
        return True

    def _first_pass(self, batch: StepBatch, hidden: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        batch.attend_as_rows = False  # only backends for GPUs do that
        return super()._first_pass(batch, hidden, last)


def save_medusa(folder: Path, hidden: int, vocab: int, num_heads: int = 3, num_layers: int = 1, names="authors") -> str:
    """In the authors' format or in vLLM's."""
    torch.manual_seed(1)
    tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            place = f"{i}.{j}.linear" if names == "authors" else f"medusa_heads.blocks.{i}.layers.{j}"
            tensors[f"{place}.weight"] = torch.randn(hidden, hidden) * 0.2
            if names == "authors":
                tensors[f"{place}.bias"] = torch.randn(hidden) * 0.2
        place = f"{i}.{num_layers}" if names == "authors" else f"medusa_heads.lm_heads.{i}"
        tensors[f"{place}.weight"] = torch.randn(vocab, hidden)
    if names == "authors":
        config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "x"}
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        config = {"model_type": "medusa", "num_heads": num_heads, "num_hidden_layers": num_layers, "vocab_size": vocab}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def medusa_drafts(tensors: dict[str, torch.Tensor], hidden: torch.Tensor, num_layers: int) -> list[int]:
    """Of heads in the authors' names, from one hidden state."""
    drafts = []
    for i in range(1 + max(int(name.split(".")[0]) for name in tensors)):
        x = hidden
        for j in range(num_layers):
            weight, bias = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        drafts.append(int((tensors[f"{i}.{num_layers}.weight"] @ x).argmax()))
    return drafts


EAGLE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
EAGLE |= {"vocab_size": 211, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_hidden_layers": 1, "hidden_act": "silu"}
EAGLE |= {"max_position_embeddings": 64, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def layer_tensors(place: str, wide: bool, head_dim: int = 16) -> dict[str, torch.Tensor]:
    """A Llama layer's, without its first norm; `wide`: its attention reads twice the hidden size."""
    hidden, inner, heads, kv_heads = (EAGLE[n] for n in ("hidden_size", "intermediate_size", *HEADS))
    attend = hidden * (2 if wide else 1)
    shapes = {
        "self_attn.q_proj": (heads * head_dim, attend),
        "self_attn.k_proj": (kv_heads * head_dim, attend),
        "self_attn.v_proj": (kv_heads * head_dim, attend),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{place}.{name}.weight": torch.randn(*shape) * 0.15 for name, shape in shapes.items()}
    return tensors | {f"{place}.post_attention_layernorm.weight": torch.rand(hidden) + 0.5}


HEADS = ("num_attention_heads", "num_key_value_heads")


def save_eagle1(folder: Path, speculators: bool = False, bias: bool = True, vocab: int = 211) -> str:
    """As the authors' .bin, or as the speculators library's safetensors."""
    torch.manual_seed(2)
    fc = "fusion_fc" if speculators else "fc"
    tensors = layer_tensors("transformer" if speculators else "layers.0", wide=False)
    tensors[f"{fc}.weight"] = torch.randn(64, 128) * 0.15
    if bias:
        tensors[f"{fc}.bias"] = torch.randn(64) * 0.15
    config: dict[str, object] = EAGLE | {"bias": bias, "vocab_size": vocab}
    if speculators:
        config = {
            "speculators_model_type": "eagle",
            "transformer_layer_config": EAGLE | {"vocab_size": vocab},
            "fusion_bias": bias,
        }
        config |= {"architectures": ["EagleSpeculator"], "layernorms": False}
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def save_eagle3(
    folder: Path, speculators: bool = False, draft_vocab: int = 96, vocab: int = 211, **keys: object
) -> str:
    torch.manual_seed(3)
    place = "layers.0" if speculators else "midlayer"
    tensors = layer_tensors(place, wide=True)
    tensors["fc.weight"] = torch.randn(64, 3 * 64) * 0.15
    tensors |= {f"{place}.{name}.weight": torch.rand(64) + 0.5 for name in ("input_layernorm", "hidden_norm")}
    tensors |= {"norm.weight": torch.rand(64) + 0.5, "lm_head.weight": torch.randn(draft_vocab, 64)}
    ids = torch.randperm(vocab)[:draft_vocab].sort().values
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.isin(torch.arange(vocab), ids)
    sizes = EAGLE | {"vocab_size": vocab}
    config: dict[str, object] = sizes | {"draft_vocab_size": draft_vocab, "architectures": ["LlamaForCausalLMEagle3"]}
    if speculators:
        tensors["embed_tokens.weight"] = torch.randn(vocab, 64)
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": sizes,
            "draft_vocab_size": draft_vocab,
        }
        config |= {"architectures": ["Eagle3Speculator"], "norm_before_residual": True, "target_hidden_size": None}
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config | keys))
    return str(folder)


def check_eagle_drafts(
    folder: str, known: list[int], states: torch.Tensor, embed: Module, unembed: Module, drafts: list[int]
) -> None:
    """Each draft is the likeliest after those before, but for rounding, by a plain forward pass over all positions.
    `states` [len(known) - 1, width], `embed` and `unembed` are the target's."""
    tensors, config = read_head(folder)
    eagle3 = "midlayer.hidden_norm.weight" in tensors
    hidden = states @ tensors["fc.weight"].T if eagle3 else states
    tokens = list(known[1:])
    for draft in drafts:
        ids = torch.tensor(tokens)
        x = tensors["embed_tokens.weight"][ids] if "embed_tokens.weight" in tensors else embed(ids)
        if eagle3:
            out = eagle3_layer(tensors, x, hidden, bool(config.get("norm_before_residual")))
            logits = (rms_norm(out[-1:], tensors["norm.weight"]) @ tensors["lm_head.weight"].T)[0]
            place = int(tensors["t2d"][:draft].sum())
            assert tensors["t2d"][draft], draft
        else:
            out = eagle1_layer(tensors, x, hidden)
            logits, place = unembed(out[-1:])[0], draft
        best = logits.max()
        assert logits[place] >= best - 1e-5 * logits.abs().max(), (len(known), draft, int(logits.argmax()))
        tokens.append(draft)
        hidden = torch.cat((hidden, out[-1:]))


def read_head(folder: str) -> tuple[dict, dict]:
    config = json.loads((Path(folder) / "config.json").read_text())
    file = Path(folder) / "pytorch_model.bin"
    found = torch.load(file, weights_only=True) if file.exists() else load_file(f"{folder}/model.safetensors")
    renamed = {"fusion_fc": "fc", "transformer": "layers.0"}
    if "norm.weight" in found:
        renamed = {"layers.0": "midlayer"}
    for old, new in renamed.items():
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return found, config


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D]"""
    count, _, size = x.shape
    angles = torch.outer(torch.arange(count).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
    cos, sin = (torch.cat((part, part), -1).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def attention(tensors: dict[str, torch.Tensor], place: str, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ tensors[f"{place}.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = (part.unflatten(-1, (-1, 16)) for part in (q, k, v))
    q, k = rotated(q), rotated(k)
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (q, k, v)), is_causal=True
    )
    return out.transpose(0, 1).flatten(1) @ tensors[f"{place}.self_attn.o_proj.weight"].T


def mlp(tensors: dict[str, torch.Tensor], place: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"{place}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def eagle1_layer(tensors: dict[str, torch.Tensor], embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    x = torch.cat((embeds, hidden), -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
    x = x + attention(tensors, "layers.0", x)
    return x + mlp(tensors, "layers.0", rms_norm(x, tensors["layers.0.post_attention_layernorm.weight"]))


def eagle3_layer(
    tensors: dict[str, torch.Tensor], embeds: torch.Tensor, hidden: torch.Tensor, norm_first: bool
) -> torch.Tensor:
    normed = rms_norm(hidden, tensors["midlayer.hidden_norm.weight"])
    residual = normed if norm_first else hidden
    x = torch.cat((rms_norm(embeds, tensors["midlayer.input_layernorm.weight"]), normed), -1)
    x = residual + attention(tensors, "midlayer", x)
    return x + mlp(tensors, "midlayer", rms_norm(x, tensors["midlayer.post_attention_layernorm.weight"]))
