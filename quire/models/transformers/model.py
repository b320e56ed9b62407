"""Causal language models of transformers with our attention, where theirs goes through its attention interface."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quire.attention.base import ForwardContext
from quire.checkpoint.resolve import Checkpoint
from quire.layers.attention import Attention
from quire.models.decoder import MAX_EXTRA_FOR_TIED_HEAD
from quire.models.transformers.attention import (
    NO_INTERFACE,
    SERVING,
    AttentionFacts,
    CurrentStep,
    PagedHandler,
    Unsupported,
    handle_calls,
    register,
)
from quire.models.transformers.class_import import auto_config
from quire.models.transformers.fuse import pack_weights, replace_parts
from quire.models.transformers.load import check_attention, load_weights, progress_bars, random_weights
from quire.models.transformers.probe import (
    Anatomy,
    Head,
    examine,
    hidden_states,
    packed_logits,
    probe_tokens,
    relative_error,
    tolerance,
)
from quire.models.transformers.rope import freeze_rope

logger = logging.getLogger("quire")


def load_transformers_model(
    checkpoint: Checkpoint,
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None = None,
    trust_remote_code: bool = False,
    longest: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> "TransformersModel":
    """`longest`: the longest sequence that will be asked for."""
    name = (hf_config.get("architectures") or [hf_config.get("model_type")])[0]
    through = f"{name} would be served through transformers"
    if checkpoint.is_gguf:
        raise ValueError(f"{through}, which reads no GGUF here; give the model's Hugging Face folder")
    if quantization is not None or hf_config.get("quantization_config"):
        method = quantization or hf_config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"{through}, but its weights are to be quantized ({method}); only our own models can be")
    config = auto_config(checkpoint, hf_config, trust_remote_code)
    register()
    try:
        check_attention(config)
        if checkpoint.format == "dummy":
            model = random_weights(config, dtype, device, SERVING, trust_remote_code, seed)
        else:
            with progress_bars(progress):
                model = load_weights(checkpoint, config, dtype, device, SERVING, trust_remote_code)
        model.requires_grad_(False).eval()
        freeze_rope(model, longest)
        return TransformersModel(model, config.get_text_config().vocab_size)
    except (TypeError, AttributeError, ArithmeticError, IndexError, AssertionError) as error:
        raise ValueError(f"{through}, which fails with its config: {error!r}") from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{through}, which fails with its config or weights: {error}") from error
    except (Unsupported, KeyError) as error:
        # Some older models have a table of attention classes instead of the interface.
        if isinstance(error, KeyError) and error.args != (SERVING,):
            raise
        reason = error if isinstance(error, Unsupported) else NO_INTERFACE
        raise ValueError(f"{through}, but that does not work: {reason}") from error


class TransformersModel(nn.Module):
    embed_tokens = None  # torch operations of the model's own are among our kernels
    capturable = True

    kernel_row_counts: tuple[int, ...] = ()

    def __init__(self, model: Any, vocab_size: int) -> None:
        """`model` has its weights already."""
        super().__init__()
        anatomy = examine(model, vocab_size)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        sequences = probe_tokens(vocab_size, anatomy.expected.device)
        if anatomy.expected.device.type == "cuda":
            self.capturable = _needs_no_host(model, anatomy, sequences)
        tied = getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight
        replace_parts(model)
        if anatomy.expected.device.type == "cpu":
            _check_parts(model, anatomy, sequences)
        self.model = model
        self.first_position = anatomy.first_position
        self.attentions = nn.ModuleList(_attention(i, facts) for i, (_, facts) in enumerate(anatomy.calls))
        self.step = CurrentStep()
        self.handlers = self._make_handlers(anatomy)
        # Outside of the module tree: they are made of the same modules.
        self.parts = (model.get_submodule(anatomy.base), Head(model, anatomy))
        self.layer_list = self._find_layers()
        if not self._runs_with_fewer_layers(anatomy, sequences):
            self.layer_list = None
        for module, handler in self.handlers.items():
            handle_calls(module, handler)
        self._pack(tied)

    def _make_handlers(self, anatomy: Anatomy) -> dict[nn.Module, PagedHandler]:
        calls: dict[nn.Module, list[tuple[AttentionFacts, Attention]]] = {}
        for (module, facts), layer in zip(anatomy.calls, self.attention_layers(), strict=True):
            calls.setdefault(module, []).append((facts, layer))
        return {module: PagedHandler(each, self.step, anatomy.dtype) for module, each in calls.items()}

    def _pack(self, tied: bool) -> None:
        head = self.model.get_output_embeddings()
        extra = head.in_features * head.out_features if tied else 0
        pack_weights(self.model, except_for=head if extra > MAX_EXTRA_FOR_TIED_HEAD * self.num_parameters else None)

    def forward(
        self,
        input_ids: torch.Tensor,  # [N]
        positions: torch.Tensor,  # [N]
        ctx: ForwardContext,
        inputs_embeds: torch.Tensor | None = None,  # [N, hidden], instead of input_ids
        intermediate: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # [N, hidden]
        if intermediate is not None:
            raise NotImplementedError("a transformers model has no pipeline stages")
        self.step.ctx = ctx
        for handler in self.handlers.values():
            handler.turn = 0
        if self.first_position:
            positions = positions + self.first_position
        try:
            return hidden_states(self.parts[0], input_ids if inputs_embeds is None else None, positions, inputs_embeds)
        finally:
            self.step.ctx = None

    @property
    def max_positions(self) -> int | None:
        """Learned positions may begin with some that no token has."""
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        return length - self.first_position if self.first_position and length else None

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab], by whatever the model's own forward does behind its base."""
        return self.parts[1](hidden_rows)

    def attention_layers(self) -> list[Attention]:
        return [layer for layer in self.attentions if isinstance(layer, Attention)]

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        if self.layer_list is None:
            yield
            return
        parent, name, layers = self.layer_list
        kinds: dict[Any, nn.Module] = {}
        for layer in layers:
            kinds.setdefault(self._kind(layer), layer)
        setattr(parent, name, nn.ModuleList(kinds.values()))
        try:
            yield
        finally:
            setattr(parent, name, layers)

    def _find_layers(self) -> tuple[nn.Module, str, nn.ModuleList] | None:
        """Where the list of layers stands, and the list."""
        wanted = set(self.handlers)
        for parent in self.parts[0].modules():
            for name, child in parent.named_children():
                holds = [bool(wanted & set(layer.modules())) for layer in child] if _is_list(child) else []
                if holds and all(holds) and len(holds) == len(wanted):
                    assert isinstance(child, nn.ModuleList)
                    return parent, name, child
        return None

    def _runs_with_fewer_layers(self, anatomy: Anatomy, sequences: list[torch.Tensor]) -> bool:
        try:
            with self.one_layer_of_each_kind():
                packed_logits(self.model, anatomy, sequences)
        except (IndexError, KeyError):
            return False
        return True

    def _kind(self, layer: nn.Module) -> Any:
        modules = list(layer.modules())
        attention = next(self.handlers[module] for module in modules if module in self.handlers)
        sizes = tuple((type(m).__name__, getattr(m, "in_features", 0), getattr(m, "out_features", 0)) for m in modules)
        return attention.calls[0][1].kind, sizes


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 1


def _attention(index: int, facts: AttentionFacts) -> Attention:
    return Attention(
        index,
        facts.num_heads,
        facts.num_kv_heads,
        facts.head_size,
        facts.scale,
        facts.window,
        softcap=facts.softcap,
        sinks=None if facts.sinks is None else nn.Parameter(facts.sinks.detach().float().clone(), requires_grad=False),
    )


def _check_parts(model: Any, anatomy: Anatomy, sequences: list[torch.Tensor]) -> None:
    """Also finds out whose weights the model's own code reads."""
    logits = packed_logits(model, anatomy, sequences)
    error = relative_error(logits, anatomy.expected)
    if error > 2 * tolerance(anatomy.dtype):
        raise Unsupported(f"with our kernels its logits are off by {error:.1%}")


def _needs_no_host(model: Any, anatomy: Anatomy, sequences: list[torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_logits(model, anatomy, sequences)
    except RuntimeError as error:
        logger.warning("steps run without CUDA graphs: the model's code waits for the device (%s)", error)
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True
