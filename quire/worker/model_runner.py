"""Executes plans: applies their changes to the rows, runs the model, samples."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.attention.group_backends import GroupBackends
from quire.attention.step_batch import StepBatch, first_tokens
from quire.distributed.group import ALONE, Group
from quire.features.store import FeatureStore
from quire.kernels.dispatch import supports_triton
from quire.kernels.prepare_inputs import PreparedInputs, prepare_inputs
from quire.kernels.sample_tokens import Draw
from quire.kernels.transfer import to_device
from quire.kernels.workspace import reset_shared_workspaces
from quire.layers.stage_link import ONE_STAGE, OneStage
from quire.lora.state import LoRAState
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import Logprobs, PromptLogprobs
from quire.models.base import LanguageModel, WritesLastApart
from quire.pooling.heads import Heads
from quire.pooling.pooler import Pooled, Pooler, by_place
from quire.sample.processors import LogitsProcessor, SampleBatch
from quire.sample.prompt_logprobs import PromptLogprobsTracker
from quire.sample.ranks import make_sampler
from quire.spec_decode.hidden_states import HiddenStates
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.worker.cache_pages import block_view, new_pages, page_views
from quire.worker.graphs import DECODE_ROWS, MIXED_TOKENS, GraphKey, StepBuffers, StepGraphs, graph_sizes
from quire.worker.kv_transfers import WorkerTransfers
from quire.worker.recorded import RecordedSteps
from quire.worker.rows import RowState
from quire.worker.transfer import Pending
from quire.worker.verification import drafts_of, logit_positions, sample_and_verify

# From this length and number of rows on, a prefix that all rows share is attended to once for all of them.
MIN_SHARED_PREFIX = 512
MIN_SHARING_ROWS = 9
# Tokens that a step has to have beside two a row for its last layer to be computed for the rows' last tokens alone.
MIN_TOKENS_APART = 64
# Larger steps use the same kernels as the largest of these.
COMPILED_ROWS = [rows for rows in DECODE_ROWS if rows <= 96]

# Token ids and positions of a step -> embeddings and positions, with features in their places.
Overlay = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class PendingStep:
    """A step between its forward pass and sampling."""

    plan: SchedulerOutput
    rows: torch.Tensor | None = None  # [n or more]: the plan's, then padding
    logits: torch.Tensor | None = None  # [as many, vocab]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: Pending[dict[int, np.ndarray]] | None = None


class ModelRunner:
    def __init__(
        self,
        model: LanguageModel,
        backends: GroupBackends,
        device: torch.device,
        vocab_size: int,
        logprobs_mode: str = "raw_logprobs",
        use_graphs: bool = False,
        processors: Sequence[LogitsProcessor] = (),
        proposer: Proposer | None = None,
        num_drafts: int = 0,
        lora: LoRAState | None = None,
        graph_sizes: Sequence[int] | None = None,
        largest_graph: int | None = None,
        share_prefixes: bool = True,
        tensor: Group = ALONE,
        stages: OneStage = ONE_STAGE,
        heads: Heads | None = None,
        cache_memory: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`processors` are users' own logits processors. `num_drafts`: the most that a row verifies in a step. `lora`:
        that of the model's layers, if rows may have adapters. `graph_sizes` and `largest_graph` are those of users, if
        they set any. `tensor`: the ranks that share every layer, of which the first samples. `stages`: what
        connects this stage with the others. `heads`: what follows pooling. The cache is allocated inside of
        `cache_memory`."""
        self.model = model
        self.heads, self.cache_memory = heads, cache_memory
        self.stages = stages
        # Then no row ever samples, and what graphs return are hidden states.
        self.pools_only = heads is not None and heads.setup is not None and stages is ONE_STAGE and not num_drafts
        self._computes_logits = stages.is_last and not self.pools_only and getattr(model, "supports_generation", True)
        self.backends, self.device = backends, device
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode
        self.transfers: WorkerTransfers | None = None
        self._layer_hooks: WorkerTransfers | None = None  # None if no connector works layer by layer
        self.use_graphs = use_graphs
        self.processors = processors
        self.proposer = proposer
        self.num_drafts = num_drafts
        self.lora = lora
        self.graph_sizes, self.largest_graph = graph_sizes, largest_graph
        self.share_prefixes, self.tensor = share_prefixes, tensor
        self.graphs: StepGraphs | None = None
        self.recorded: RecordedSteps | None = None
        self.hidden: HiddenStates | None = None  # that the proposer reads
        self._pending: PendingStep | None = None
        self._compiling: bool | None = None  # whether kernels are being collected; None: not done yet
        self._deferred_jobs: list[Any] = []  # kernels to compile once the engine serves

    def initialize(self, config: KVCacheConfig, max_num_seqs: int, max_model_len: int) -> None:
        """Allocate rows and cache; hand every layer its part."""
        pages = self.backends.pages_per_block(config.groups)
        drafting = self.proposer.cache_layers() if self.proposer is not None else ()
        self.rows = RowState(
            max_num_seqs, max_model_len, config, self.device, self.num_drafts, pages, clears_tables=len(drafting) > 0
        )
        self._last_position = max_model_len - 1
        self.features = FeatureStore(self.model, max_num_seqs, self.device)
        self.block_sizes = [group.spec.block_size for group in config.groups]
        drawing = (max_num_seqs, self.vocab_size, self.device, self.logprobs_mode, self.processors)
        self.sampler = make_sampler(self.tensor, *drawing)
        self.prompt_logprobs = PromptLogprobsTracker(
            self._compute_logits, self.logprobs_mode, answers=self.tensor.rank == 0
        )
        self.pooler = Pooler(self.heads)
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=self.device)
        layers = {layer.layer_index: layer for layer in (*self.model.cache_layers(), *drafting)}
        # Tensor i backs layer i of every group.
        with self.cache_memory():
            self.kv_tensors = [new_pages(config, self.device) for _ in range(config.num_tensors)]
        self._block_views: dict[int, torch.Tensor] = {}  # by layer
        for index, (group, count) in enumerate(zip(config.groups, pages, strict=True)):
            for tensor, layer in zip(self.kv_tensors, group.layers, strict=False):
                views = page_views(tensor, group.spec, count)
                layers[layer].bind(views, index, self.backends.by_group[index])
                self._block_views[layer] = block_view(tensor, group.spec)
        if self.proposer is not None and self.proposer.hidden_outputs:
            # As many as graphs may have.
            most = max(max_num_seqs * (1 + self.num_drafts), MIXED_TOKENS[-1], *(self.graph_sizes or ()))
            self.hidden = HiddenStates(self.proposer.hidden_outputs, max_num_seqs, most, self.device)
            self.proposer.hidden = self.hidden
        if self.backends.supports_replay and self.device.type == "cpu":
            tables, sizes = self.rows.block_tables, self.rows.block_sizes
            wanted = () if self.hidden is None else self.hidden.layers
            self.recorded = RecordedSteps(self.model, self.backends, tables, sizes, self.lora, wanted)
        # The model, if its last layer may be computed for some tokens alone.
        self._apart = self.model if isinstance(self.model, WritesLastApart) and self.hidden is None else None
        if self.proposer is not None:
            self.proposer.parameters = self.sampler.parameters.device
            self.proposer.initialize(self.rows, self.backends, self._last_position)

    def bind_connectors(self, transfers: WorkerTransfers, notify: Callable[[], None]) -> None:
        """After `initialize`: hand them the cache of each layer, by block."""
        transfers.bind(self._block_views, self.kv_tensors, notify)
        self.transfers, self._layer_hooks = transfers, transfers.layer_hooks

    def reset_workspaces(self) -> None:
        """After a failed step or capture."""
        reset_shared_workspaces()
        self.backends.reset_workspaces()

    def recover(self) -> None:
        """After a failed step."""
        self.reset_workspaces()
        self.stages.abandon()

    @torch.inference_mode()
    def capture_graphs(self, max_tokens: int, largest_only: bool = False) -> None:
        self.compile_kernels(max_tokens)
        if self.use_graphs:
            max_rows = len(self.rows.num_tokens)
            decode, mixed = graph_sizes(max_rows, max_tokens, self.graph_sizes, self.largest_graph)
            self.graphs = StepGraphs(
                self._captured_step,
                self.backends,
                max_rows,
                max_tokens,
                self.device,
                self.reset_workspaces,
                self.num_drafts,
                self.lora is not None,
                ([] if self.pools_only else decode, mixed),
            )
            self.graphs.capture_at_start(largest_only)
            if self.proposer is not None:
                self.proposer.capture_graphs(self.graphs.decode_rows[-1:] if largest_only else self.graphs.decode_rows)
            if not largest_only:
                from quire.kernels.triton.precompile import compile_in_background

                compile_in_background(self._deferred_jobs)

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        self.stages.begin(plan, self.rows)
        try:
            if self.transfers is not None:
                # First of all: it may save blocks that the plan overwrites, and hears of the plan even if that fails.
                self.transfers.start(plan.connector_meta)
        finally:
            self._apply_changes(plan)
        step = PendingStep(plan)
        if len(plan.rows):
            self._forward(step)
        if self.transfers is not None:
            self.transfers.finish_step()
        self._pending = step

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarMask | None = None) -> Pending[ModelRunnerOutput]:
        assert self._pending is not None, "sample_tokens() without execute_model()"
        step, self._pending = self._pending, None
        if self.lora is not None:
            self.lora.active = False  # drafts are the base's
        pending = self._sample_step(step, grammar)
        self.stages.hand_back()
        return pending

    def _sample_step(self, step: PendingStep, grammar: GrammarMask | None) -> Pending[ModelRunnerOutput]:
        # Finished transfers are read last: those read before something fails would be lost.
        if step.logits is None:
            # A tensor to wait for, or the host would run ahead of prompts that pool without limit.
            waited = () if step.rows is None or step.pooled is not None else (step.rows[:1],)
            return Pending(lambda *_: self._complete(step, _nothing_sampled()), *waited)
        assert step.rows is not None
        drafts, proposer = step.plan.num_drafts, self.proposer
        if proposer is not None and drafts is None:
            proposer.skip(step.plan)
        # One that looks drafts up needs no more than the tokens, so a step without drafts is sampled as usual.
        if drafts is None or (proposer is not None and proposer.finds and not drafts.any()):
            return self._sample(step, step.logits, grammar)
        assert proposer is not None, "a plan with drafts, which no one proposes"
        hidden = None if self.hidden is None else self.hidden.of_step(step.plan.total_tokens)
        return sample_and_verify(
            step.plan,
            step.logits,
            step.rows[: len(step.plan.rows)],
            self.rows,
            self.sampler,
            grammar,
            self.num_drafts,
            proposer,
            DraftStep(step.plan, step.rows, self.rows, hidden),
            functools.partial(self._complete, step),
        )

    def _sample(
        self, step: PendingStep, logits: torch.Tensor, grammar: GrammarMask | None
    ) -> Pending[ModelRunnerOutput]:
        plan, state = step.plan, self.rows
        assert step.rows is not None
        count, row_list = len(plan.rows), plan.rows.tolist()
        draw = self.sampler.choose_draw(row_list, grammar) if supports_triton(self.device) else None
        if draw is not None:
            drawn = self.sampled[:count]
            self.sampler.sample_fused(logits, step.rows, state, draw, drawn)
            looked = self._look_up(step)

            def complete(ids: np.ndarray, num_found: np.ndarray | None = None) -> ModelRunnerOutput:
                return self._complete(step, _output(ids, None, num_found))

            return Pending(complete, drawn, *looked)
        rows = step.rows[:count].long()
        positions = state.num_tokens[rows]
        batch = SampleBatch(
            rows=rows,
            row_list=row_list,
            positions=positions,
            done=state.num_computed[rows] == positions,
            token_ids=state.token_ids,
        )
        sampled = self.sampler.sample(logits[:count], batch, grammar)
        state.append_tokens(batch.rows, sampled.token_ids, batch.done)
        top = sampled.logprobs
        looked = self._look_up(step)
        # Masks of the next plan are made for what it will verify, whatever lies there if the proposer rests.
        held = [drafts_of(rows, state, self.num_drafts)] if self.proposer and self.sampler.constrains(row_list) else []

        def make(ids: np.ndarray, *found: np.ndarray) -> ModelRunnerOutput:
            rest = list(found)
            num_found = rest.pop(0) if looked else None
            drafts = rest.pop(0) if held else None
            output = _output(ids, Logprobs(np.asarray(sampled.places), *rest) if rest else None, num_found)
            output.drafts = drafts
            return self._complete(step, output)

        arrays = (top.token_ids, top.logprobs, top.ranks) if top is not None else ()
        return Pending(make, sampled.token_ids.int(), *looked, *held, *arrays)

    def _look_up(self, step: PendingStep) -> list[torch.Tensor]:
        """Drafts for the rows of a step without any, if it is to be followed by a proposal: how many were found."""
        if step.plan.num_drafts is None or self.proposer is None or step.rows is None:
            return []
        self.proposer.propose_on_ranks(DraftStep(step.plan, step.rows, self.rows))
        return [self.rows.num_found[step.rows[: len(step.plan.rows)].long()]]

    def _complete(self, step: PendingStep, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Adds prompt logprobs, pooled vectors, and the requests whose KV transfers have finished."""
        self.sampler.check(output.token_ids)
        output.prompt_logprobs = step.prompt_logprobs
        if step.pooled is not None:
            output.pooled = step.pooled.result()
        if self.transfers is not None:
            output.transfers = self.transfers.get_finished()
        return output

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        self.features.release(plan)
        for row in plan.finished_rows if self.stages.is_last else ():
            self.sampler.remove_row(row)
            self.prompt_logprobs.remove_row(row)
            self.pooler.remove_row(row)
            if self.proposer is not None:
                self.proposer.remove_row(row)
        self.rows.add(plan.new_rows)
        for new in plan.new_rows if self.stages.is_last else ():
            self.sampler.add_row(new)
            self.prompt_logprobs.add_row(new)
            self.pooler.add_row(new)
            if self.proposer is not None:
                self.proposer.add_row(new)
        if self.proposer is not None and self.proposer.sampled is not None:
            self.proposer.sampled.forget([new.row for new in plan.new_rows])
        self.features.add(plan)
        self.rows.append_blocks(plan.appended)
        if plan.block_copies:
            copies = np.array(plan.block_copies)
            source, target = to_device(self.device, copies[:, 0], copies[:, 1], dtype=np.int64)
            for tensor in self.kv_tensors:
                tensor.index_copy_(0, target, tensor.index_select(0, source))
        if self.lora is not None:
            self.lora.update_rows(plan.finished_rows, plan.new_rows)

    def _forward(self, pending: PendingStep) -> None:
        plan = pending.plan
        self.stages.receive()
        decode_only = len(plan.rows) == plan.total_tokens
        prefix_len = self._shared_prefix(plan) if decode_only else 0
        adapters = self.lora is not None and self.lora.needed(plan.rows)
        capturable = self._layer_hooks is None and plan.features is None
        needs_hidden = self.prompt_logprobs.needed(plan) or self.pooler.needed(plan)
        if self.graphs is not None and capturable and needs_hidden == self.pools_only:
            replayed = None
            if decode_only and not self.pools_only:
                replayed = self.graphs.run_decode(plan.rows, prefix_len, adapters=adapters)
            elif plan.num_drafts is None or not plan.num_drafts.any():
                replayed = self.graphs.run_mixed(plan.rows, plan.num_tokens, adapters)
            elif (plan.num_tokens == 1 + plan.num_drafts).all() and (plan.num_drafts == plan.num_drafts[0]).all():
                replayed = self.graphs.run_decode(plan.rows, 0, int(plan.num_tokens[0]), adapters)
            if replayed is not None:
                pending.rows, result = replayed
                if self.pools_only:
                    pending.pooled = _to_host(self.pooler.pool(plan, result))
                elif not self.stages.send(result):
                    pending.logits = result
                return
        query_start = first_tokens(plan.num_tokens)
        more = (logit_positions(query_start, plan.num_drafts), [prefix_len])
        batch, (last, prefix) = StepBatch.planned(plan.rows, plan.num_tokens, self.backends, self.device, more)
        pending.rows = batch.rows
        if plan.features is not None:
            self.features.encode(plan.features)
        verifies = plan.num_drafts is not None and bool(plan.num_drafts.any())
        reads_more = adapters or verifies or (needs_hidden and not self.pooler.reads_last_tokens(plan))
        apart = self._computes_last_apart(len(plan.rows), plan.total_tokens, reads_more)
        hidden = self._compute_hidden(
            batch,
            prefix if prefix_len else None,
            last if apart else None,
            adapters=adapters,
            overlay=None
            if plan.features is None
            else functools.partial(self.features.overlay, plan.features, query_start),
        )
        if self.stages.send(hidden):
            return
        if not self.pooler.pools_all(plan):
            pending.logits = self._compute_logits(hidden, slice(None) if decode_only or apart else last)
        pending.prompt_logprobs = self.prompt_logprobs.compute(plan, hidden)
        pending.pooled = _to_host(self.pooler.pool(plan, hidden, of_last=apart))

    @torch.inference_mode()
    def compile_kernels(self, max_tokens: int) -> None:
        """Compile every kernel that a step of any size launches, so that none waits for the compiler. Those that only
        some requests' sampling needs are listed, to be compiled while the engine serves."""
        if not self.use_graphs or self._compiling is not None:
            return
        from quire.kernels.triton.lora import TOKEN_COUNTS
        from quire.kernels.triton.precompile import collecting, compile_all

        buffers = StepBuffers(len(self.rows.num_tokens), 0, (), self.device)
        self._compiling = True
        with collecting() as jobs, self.model.one_layer_of_each_kind():
            for adapters in (False, True) if self.lora is not None else (False,):
                for num_tokens in (16, *self.model.kernel_row_counts, *(TOKEN_COUNTS if adapters else ())):
                    if num_tokens <= max_tokens:
                        self.run_padding(num_tokens, adapters)
                for num_rows in COMPILED_ROWS:
                    if num_rows <= len(self.rows.num_tokens):
                        logits = self._captured_step(GraphKey(num_rows, num_rows, True, adapters=adapters), buffers)
            for num_rows in (MIN_SHARING_ROWS, len(self.rows.num_tokens)):
                if num_rows <= len(self.rows.num_tokens) and len(self.rows.block_sizes) == 1:
                    self._captured_step(GraphKey(num_rows, num_rows, decode_only=True, shared_prefix=True), buffers)
            if self.proposer is not None:
                self.proposer.launch_kernels([n for n in COMPILED_ROWS if n <= len(self.rows.num_tokens)], max_tokens)
            for draw in Draw if self._computes_logits else ():
                self.sampler.sample_fused(logits, buffers.rows[: len(logits)], self.rows, draw, self.sampled)
        with collecting() as later:
            if self._computes_logits:
                self.sampler.launch_optional_kernels(logits[:4], self.rows.num_tokens, self.num_drafts)
            if self.proposer is not None and self.proposer.sampled is not None:
                self.proposer.sampled.launch_kernels(logits[:4], self.rows, self.sampler.parameters.device)
        self._compiling = False
        self._deferred_jobs = later
        compile_all(jobs)

    @torch.inference_mode()
    def run_padding(self, num_tokens: int, adapters: bool = False) -> torch.Tensor:
        """Logits of a step of padding: allocates the memory and compiles the kernels of a real step of that size."""
        rows = min(num_tokens, len(self.rows.num_tokens))
        batch = StepBatch.padding(rows, num_tokens, self.backends, self.device)
        hidden = self._compute_hidden(batch, None, adapters=adapters)
        return self._compute_logits(hidden, slice(rows * (1 + self.num_drafts))) if self._computes_logits else hidden

    def _compute_logits(self, hidden: torch.Tensor, tokens: torch.Tensor | slice) -> torch.Tensor:
        """Of these tokens of the step."""
        with self.lora.logits_of(tokens) if self.lora is not None else nullcontext():
            return self.model.compute_logits(hidden[tokens])

    def _captured_step(self, key: GraphKey, buffers: StepBuffers) -> torch.Tensor:
        rows = buffers.rows[: key.num_rows]
        if key.decode_only:
            prefix = buffers.prefix_len if key.shared_prefix else None
            batch = StepBatch.of_equal(rows, key.tokens_per_row, buffers.query_start)
            hidden = self._compute_hidden(batch, prefix, adapters=key.adapters)
            return self._compute_logits(hidden, slice(None)) if self._computes_logits else hidden
        token_rows = buffers.token_rows[: key.num_tokens]
        limits = self.backends.max_query_blocks(key.num_tokens, key.num_rows)
        blocks = [part[:limit] for part, limit in zip(buffers.query_blocks, limits, strict=True)]
        batch = StepBatch(rows, buffers.query_start, token_rows, blocks)
        last = buffers.last_token[: key.num_rows]
        apart = self._computes_last_apart(key.num_rows, key.num_tokens, key.adapters or self.pools_only)
        hidden = self._compute_hidden(batch, None, last if apart else None, adapters=key.adapters)
        return self._compute_logits(hidden, slice(None) if apart else last) if self._computes_logits else hidden

    def _computes_last_apart(self, num_rows: int, num_tokens: int, reads_more: bool) -> bool:
        """Whether the last layer of a step is computed for the rows' last tokens alone. `reads_more`: it must not."""
        if num_tokens < 2 * num_rows + MIN_TOKENS_APART or reads_more or self._layer_hooks is not None:
            return False
        return self._apart is not None and self._apart.writes_last_apart()

    def _compute_hidden(
        self,
        batch: StepBatch,
        prefix_len: torch.Tensor | None,
        last: torch.Tensor | None = None,  # [n]: the only tokens whose hidden states are read, of n rows
        adapters: bool = False,  # some rows may have one
        overlay: Overlay | None = None,
    ) -> torch.Tensor:
        state, rows, query_start, token_rows = self.rows, batch.rows, batch.query_start, batch.token_rows
        tables, sizes = state.block_tables, state.block_sizes
        if self.hidden is not None:
            self.hidden.begin(state.num_computed)
        inputs = prepare_inputs(rows, query_start, token_rows, state.token_ids, state.num_computed, tables, sizes)
        if self.num_drafts:
            # Drafts may lie past the row's limit while results are in flight. They are not accepted there, but have to
            # find a row in tables of positions.
            inputs.positions.clamp_(max=self._last_position)
        indices = inputs.positions
        if self.features.position_delta is not None:
            inputs.positions = self.features.shifted(indices, rows, token_rows)
        embeds = self.stages.stream(len(inputs.input_ids))
        if self.lora is not None:
            self.lora.start_step(rows, token_rows, adapters)
        if overlay is not None:
            embeds, inputs.positions = overlay(inputs.input_ids, inputs.positions)
        streams = None if self.hidden is None else self.hidden.streams()
        if self.recorded is not None and self._layer_hooks is None and overlay is None:
            shared = int(prefix_len) if prefix_len is not None else 0
            results = self.recorded.run(rows, query_start, inputs, shared, streams, embeds, last is not None)
            if results is not None:
                if last is not None:
                    return self._forward_last(batch, inputs, last, *results)
                return self._keep(streams, *results)
        if self._compiling:
            # Nothing was launched that would have filled them, and they index tables.
            inputs.input_ids.zero_()
            inputs.positions.zero_()
        ctx = batch.context(inputs, indices, self.backends, tables, sizes, prefix_len)
        ctx.layer_hooks, ctx.adapters, ctx.streams = self._layer_hooks, adapters, streams
        if last is not None:
            assert self._apart is not None
            results = self._apart.forward_to_last(inputs.input_ids, inputs.positions, ctx, embeds)
            return self._forward_last(batch, inputs, last, *results)
        if embeds is None:
            return self._keep(streams, self.model(inputs.input_ids, inputs.positions, ctx))
        return self._keep(streams, self.model(inputs.input_ids, inputs.positions, ctx, inputs_embeds=embeds))

    def _forward_last(
        self, batch: StepBatch, inputs: PreparedInputs, last: torch.Tensor, q: torch.Tensor, stream: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of the rows' last tokens, of what `forward_to_last` gives for all."""
        assert self._apart is not None
        tables, sizes = self.rows.block_tables, self.rows.block_sizes
        ctx = batch.context_of_last(inputs, self._apart.last_group(), self.backends, tables, sizes)
        return self._apart.forward_last(q.index_select(0, last), stream.index_select(0, last), ctx)

    def _keep(self, streams: dict[int, torch.Tensor | None] | None, hidden: torch.Tensor) -> torch.Tensor:
        """For the proposer, if it reads them."""
        if self.hidden is not None and streams is not None:
            self.hidden.keep(streams, hidden)
        return hidden

    def _shared_prefix(self, plan: SchedulerOutput) -> int:
        """Length of the prefix that all rows share, if attending to it once for all is faster; else 0."""
        if len(self.rows.block_sizes) != 1 or len(plan.rows) < MIN_SHARING_ROWS or not plan.common_prefix_blocks:
            return 0
        if not self.share_prefixes:
            return 0
        length = plan.common_prefix_blocks[0] * self.block_sizes[0]
        return length if length >= MIN_SHARED_PREFIX else 0


def _to_host(pooled: list[Pooled]) -> Pending[dict[int, np.ndarray]] | None:
    """By place in the plan."""
    return Pending(lambda *arrays: by_place(pooled, arrays), *(one.vectors for one in pooled)) if pooled else None


def _nothing_sampled() -> ModelRunnerOutput:
    return ModelRunnerOutput(np.empty((0, 1), np.int32), np.empty(0, np.int32))


def _output(ids: np.ndarray, logprobs: Logprobs | None, num_found: np.ndarray | None = None) -> ModelRunnerOutput:
    return ModelRunnerOutput(ids[:, None], np.ones(len(ids), np.int32), logprobs, num_found=num_found)
