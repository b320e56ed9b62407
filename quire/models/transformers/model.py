"""A causal language model of transformers that runs with our paged attention."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quire.attention.base import ForwardContext
from quire.checkpoint.resolve import Checkpoint
from quire.layers.attention import Attention
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.decoder import MAX_EXTRA_FOR_TIED_HEAD
from quire.models.transformers.adapters import ModuleNames, find_adaptable
from quire.models.transformers.attention import (
    NO_INTERFACE,
    SERVING,
    AttentionSpec,
    CurrentStep,
    PagedHandler,
    Unsupported,
    register,
    set_handler,
)
from quire.models.transformers.library import RemoteCode, auto_config
from quire.models.transformers.probe import (
    Head,
    ProbeResult,
    attention_calls,
    batched_logits,
    hidden_states,
    probe_model,
    probe_tokens,
    relative_error,
    tolerance,
)
from quire.models.transformers.replace_modules import pack_weights, replace_modules
from quire.models.transformers.rope import freeze_rope
from quire.models.transformers.tensor_parallel import check_heads, check_plan, share_modules
from quire.models.transformers.weights import check_attention, init_with_random_weights, load_pretrained, progress_bars

logger = logging.getLogger("quire")


def load_transformers_model(
    checkpoint: Checkpoint,
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None = None,
    trust_remote_code: bool = False,
    code_revision: str | None = None,
    longest: int | None = None,
    seed: int = 0,
    progress: bool = False,
    tp: TensorParallel = SINGLE,
) -> "TransformersModel":
    """`longest`: the limit of sequence lengths. A rank of several reads the whole model on the host, and keeps a
    part."""
    name = (hf_config.get("architectures") or [hf_config.get("model_type")])[0]
    through = f"{name} would be served through transformers"
    if checkpoint.is_gguf:
        raise ValueError(f"{through}, which does not read GGUF here; give the model's Hugging Face folder")
    if quantization is not None or hf_config.get("quantization_config"):
        method = quantization or hf_config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"{through}, which does not support quantization here ({method}); only built-in families do")
    code = RemoteCode(trust_remote_code, code_revision)
    place = device if tp.size == 1 else torch.device("cpu")
    config = auto_config(checkpoint, hf_config, code)
    register()
    try:
        check_attention(config)
        if checkpoint.format == "dummy":
            model = init_with_random_weights(config, dtype, place, SERVING, code, seed)
        else:
            with progress_bars(progress):
                model = load_pretrained(checkpoint, config, dtype, place, SERVING, code)
        model.requires_grad_(False).eval()
        freeze_rope(model, longest)
        return TransformersModel(model, config.get_text_config().vocab_size, tp, device)
    except (TypeError, AttributeError, ArithmeticError, IndexError, AssertionError) as error:
        raise ValueError(f"{through}, which fails with its config: {error!r}") from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{through}, which fails with its config or weights: {error}") from error
    except (Unsupported, KeyError) as error:
        # Some older models look the implementation up in a table of attention classes.
        if isinstance(error, KeyError) and error.args != (SERVING,):
            raise
        reason = error if isinstance(error, Unsupported) else NO_INTERFACE
        raise ValueError(f"{through}, but that does not work: {reason}") from error


class TransformersModel(nn.Module):
    embed_tokens = None  # its own torch operations cannot be recorded
    capturable = True

    kernel_row_counts: tuple[int, ...] = ()
    feature_kinds: tuple[str, ...] = ()
    position_axes = 1
    embeds_scale = 1.0  # its own code scales what is given

    def __init__(
        self, model: Any, vocab_size: int, tp: TensorParallel = SINGLE, device: torch.device | None = None
    ) -> None:
        """`model`: with weights, of which a rank of several keeps its part on `device`."""
        super().__init__()
        plan = check_plan(model, tp) if tp.size > 1 else {}
        probe = probe_model(model, vocab_size)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        sequences = probe_tokens(vocab_size, probe.expected.device)
        if probe.expected.device.type == "cuda":
            self.capturable = _runs_without_sync(model, probe, sequences)
        tied = getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight
        replace_modules(model)
        if probe.expected.device.type == "cpu":
            _check_replaced(model, probe, sequences)
        link = None
        if tp.size > 1:
            check_heads(probe.calls, tp)
            link = share_modules(model, plan, tp, tied)
            model.to(device)
            self.capturable = device is None or device.type == "cpu"
            probe.calls = attention_calls(model, vocab_size)
            sequences = probe_tokens(vocab_size, next(model.parameters()).device)
        self.model = model
        self.first_position = probe.first_position
        self.attentions = nn.ModuleList(_attention(i, spec) for i, (_, spec) in enumerate(probe.calls))
        self.step = CurrentStep()
        self.handlers = self._make_handlers(probe)
        # In a tuple, outside the module tree: both consist of modules of `model`.
        self.parts = (model.get_submodule(probe.base), Head(model, probe))
        self.layer_list = self._find_layers()
        if not self._runs_with_fewer_layers(probe, sequences):
            self.layer_list = None
        self._set_handlers()
        self._probe = (probe, sequences)
        self._pack(tied)
        self._link = link
        if link is not None:
            link.connected = True

    def _set_handlers(self) -> None:
        for module, handler in self.handlers.items():
            set_handler(module, handler)

    def adapted_names(self) -> ModuleNames:
        probe, sequences = self._probe
        if self._link is not None:
            self._link.connected = False  # other ranks may not have come this far
        find_adaptable(
            self.model, lambda: batched_logits(self.model, probe, sequences), sum(len(ids) for ids in sequences)
        )
        self._set_handlers()
        if self._link is not None:
            self._link.connected = True
        return ModuleNames(self.model, "model")

    def is_elsewhere(self, name: str) -> bool:
        """It has one stage."""
        return False

    def _make_handlers(self, probe: ProbeResult) -> dict[nn.Module, PagedHandler]:
        calls: dict[nn.Module, list[tuple[AttentionSpec, Attention]]] = {}
        for (module, spec), layer in zip(probe.calls, self.cache_layers(), strict=True):
            calls.setdefault(module, []).append((spec, layer))
        return {module: PagedHandler(each, self.step, probe.dtype) for module, each in calls.items()}

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
    ) -> torch.Tensor:  # [N, hidden]
        self.step.ctx = ctx
        for handler in self.handlers.values():
            handler.next_call = 0
        if self.first_position:
            positions = positions + self.first_position
        try:
            return hidden_states(self.parts[0], input_ids if inputs_embeds is None else None, positions, inputs_embeds)
        finally:
            self.step.ctx = None

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, hidden]."""
        found: torch.Tensor = self.model.get_input_embeddings()(input_ids)
        return found

    def encode(self, kind: str, data: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        raise NotImplementedError(f"encoders of a model that runs through transformers are not served: {kind}")

    @property
    def max_positions(self) -> int | None:
        """Learned position embeddings may start with unused rows (padding)."""
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        return length - self.first_position if self.first_position and length else None

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab], by the part of the model's forward after its base."""
        return self.parts[1](hidden_rows)

    def cache_layers(self) -> list[Attention]:
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
        """Parent module, attribute name and list of the decoder layers."""
        wanted = set(self.handlers)
        for parent in self.parts[0].modules():
            for name, child in parent.named_children():
                holds = [bool(wanted & set(layer.modules())) for layer in child] if _is_list(child) else []
                if holds and all(holds) and len(holds) == len(wanted):
                    assert isinstance(child, nn.ModuleList)
                    return parent, name, child
        return None

    def _runs_with_fewer_layers(self, probe: ProbeResult, sequences: list[torch.Tensor]) -> bool:
        try:
            with self.one_layer_of_each_kind():
                batched_logits(self.model, probe, sequences)
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


def _attention(index: int, spec: AttentionSpec) -> Attention:
    return Attention(
        index,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        spec.scale,
        spec.window,
        softcap=spec.softcap,
        sinks=None if spec.sinks is None else nn.Parameter(spec.sinks.detach().float().clone(), requires_grad=False),
    )


def _check_replaced(model: Any, probe: ProbeResult, sequences: list[torch.Tensor]) -> None:
    """Compare logits after the replacement. This also records which weights the model's own code reads."""
    logits = batched_logits(model, probe, sequences)
    error = relative_error(logits, probe.expected)
    if error > 2 * tolerance(probe.dtype):
        raise Unsupported(f"with our kernels its logits are off by {error:.1%}")


def _runs_without_sync(model: Any, probe: ProbeResult, sequences: list[torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batched_logits(model, probe, sequences)
    except RuntimeError as error:
        logger.warning("steps run without CUDA graphs: the model's code waits for the device (%s)", error)
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True
