"""Runs the model over the rows a plan names."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.attention.base import AttentionBackend, ForwardContext, StepInputs
from quire.kernels.prepare_inputs import prepare_inputs
from quire.messages.connector import WorkerConnector
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import Logprobs, PromptLogprobs
from quire.sample.processors import SampleBatch
from quire.sample.sampler import Sampled, Sampler
from quire.worker.prompt_scores import PromptScores
from quire.worker.rows import RowState


@dataclass(slots=True)
class PendingStep:
    """Between forward pass and sampling."""

    plan: SchedulerOutput
    rows: torch.Tensor
    logits: torch.Tensor | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class ModelRunner:
    def __init__(
        self,
        model: Any,
        backend: AttentionBackend,
        device: torch.device,
        vocab_size: int,
        logprobs_mode: str = "raw_logprobs",
        connector: WorkerConnector | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.device = device
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode
        self.connector = connector
        self._pending: PendingStep | None = None

    def initialize(self, config: KVCacheConfig, max_num_seqs: int, max_model_len: int, dtype: torch.dtype) -> None:
        """Allocate rows and cache; hand every attention layer its part."""
        self.rows = RowState(max_num_seqs, max_model_len, config, self.device)
        self.sampler = Sampler(max_num_seqs, self.vocab_size, self.device, self.logprobs_mode)
        self.prompt_scores = PromptScores(self.model.compute_logits, self.logprobs_mode)
        layers = {layer.layer_index: layer for layer in self.model.attention_layers()}
        # Tensor i backs layer i of every group: all have pages of equal bytes, so one allocation is viewed in each
        # group's shape.
        spec = config.groups[0].spec
        shape = self.backend.kv_cache_shape(config.num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_size)
        self.kv_tensors = [_zeros(shape, dtype, self.device) for _ in range(config.num_tensors)]
        caches: dict[int, torch.Tensor] = {}
        for index, group in enumerate(config.groups):
            s = group.spec
            view = self.backend.kv_cache_shape(config.num_blocks + 1, s.block_size, s.num_kv_heads, s.head_size)
            for tensor, layer in zip(self.kv_tensors, group.layers, strict=False):
                caches[layer] = tensor.view(view)
                layers[layer].bind(caches[layer], index, self.backend)
        if self.connector is not None:
            self.connector.bind([caches[i] for i in sorted(caches)])

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        self._apply_changes(plan)
        if self.connector is not None:
            self.connector.start_load_kv(plan.connector_meta)
        step = PendingStep(plan, torch.from_numpy(plan.rows).to(self.device).long())
        if len(plan.rows):
            self._forward(step)
        if self.connector is not None:
            self.connector.wait_for_save()
        self._pending = step

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput:
        assert self._pending is not None, "sample_tokens() without execute_model()"
        step, self._pending = self._pending, None
        output = self._sample(step) if step.logits is not None else _nothing_sampled()
        if self.connector is not None:
            # Last: news taken before something fails would be lost.
            output.finished_sending, output.finished_recving = self.connector.get_finished()
        return output

    def _sample(self, step: PendingStep) -> ModelRunnerOutput:
        assert step.logits is not None
        state = self.rows
        positions = state.num_tokens[step.rows]
        batch = SampleBatch(
            rows=step.rows,
            row_list=step.plan.rows.tolist(),
            positions=positions,
            done=state.num_computed[step.rows] == positions,
            token_ids=state.token_ids,
        )
        sampled = self.sampler.sample(step.logits, batch)
        state.append_tokens(batch.rows, sampled.token_ids, batch.done)
        token_ids = sampled.token_ids.int().cpu().numpy()[:, None]
        return ModelRunnerOutput(
            token_ids=token_ids,
            num_sampled=np.ones(len(token_ids), np.int32),
            logprobs=_to_host(sampled),
            prompt_logprobs=step.prompt_logprobs,
        )

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        for row in plan.finished_rows:
            self.sampler.remove_row(row)
            self.prompt_scores.remove_row(row)
        for new in plan.new_rows:
            self.rows.add(new)
            self.sampler.add_row(new)
            self.prompt_scores.add_row(new)
        self.rows.append_blocks(plan.appended)
        if plan.block_copies:
            source, target = torch.tensor(plan.block_copies, device=self.device).T
            for tensor in self.kv_tensors:
                dim = self.backend.block_dim
                tensor.index_copy_(dim, target, tensor.index_select(dim, source))

    def _forward(self, pending: PendingStep) -> None:
        state, plan, rows = self.rows, pending.plan, pending.rows
        num_new = torch.from_numpy(plan.num_tokens).to(self.device).long()
        inputs = prepare_inputs(
            rows, num_new, plan.total_tokens, state.token_ids, state.num_computed, state.block_tables, state.block_sizes
        )
        step = StepInputs(
            num_rows=len(plan.rows),
            num_tokens=plan.total_tokens,
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            max_query_len=int(plan.num_tokens.max()),
            max_seq_len=state.token_ids.shape[1],
            common_prefix_blocks=plan.common_prefix_blocks,
        )
        metadata = [
            self.backend.build(step, table[rows], size)
            for table, size in zip(state.block_tables, state.block_sizes, strict=True)
        ]
        ctx = ForwardContext(step, metadata, inputs.slot_mapping, self.connector)
        hidden = self.model(inputs.input_ids, inputs.positions, ctx)
        state.advance(rows, num_new)
        pending.logits = self.model.compute_logits(hidden[inputs.last_token])
        pending.prompt_logprobs = self.prompt_scores.score(plan, hidden)


def _nothing_sampled() -> ModelRunnerOutput:
    return ModelRunnerOutput(np.empty((0, 1), np.int32), np.empty(0, np.int32))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages, which cost nothing until used; torch would write gigabytes of zeros at
    # start-up.
    flat = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)


def _to_host(sampled: Sampled) -> Logprobs | None:
    found = sampled.logprobs
    if found is None:
        return None
    return Logprobs(
        np.asarray(sampled.places),
        found.token_ids.cpu().numpy(),
        found.logprobs.cpu().numpy(),
        found.ranks.cpu().numpy(),
    )
