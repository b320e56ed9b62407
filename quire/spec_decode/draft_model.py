"""Drafts by a smaller model of the same vocabulary, which computes every token that the target does."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.group_backends import GroupBackends
from quire.attention.step_batch import StepBatch
from quire.checkpoint.config import load_hf_config, text_part
from quire.checkpoint.resolve import resolve_model
from quire.config import EngineConfig
from quire.layers.cache_layer import CacheLayer
from quire.messages.plan import SchedulerOutput
from quire.models.base import LanguageModel
from quire.models.loading.loader import load_model
from quire.spec_decode.draft_runner import DraftGraphs, DraftRunner
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.spec_decode.sampled import SampledDrafts
from quire.worker.recorded import RecordedSteps
from quire.worker.rows import RowState

# What a row that decodes has to compute: the last token accepted, whose draft was the last and so not computed, or was
# another one, and the new token.
TOKENS_BEHIND = 2


class DraftModelProposer(Proposer):
    """After a step the model computes what the step did and the token drawn last, whose logits give the first draft;
    then each draft in turn, but for the last. So its part of the cache never lags behind the target's, and prefixes hit
    for both alike. What it is left out of, it computes later, as far as a step's tokens allow."""

    agrees = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.config, self.device = config, device
        self.recorded: RecordedSteps | None = None
        assert config.scheduler.max_num_seqs is not None and config.scheduler.max_num_batched_tokens is not None
        self._max_tokens = config.scheduler.max_num_batched_tokens + config.scheduler.max_num_seqs
        self._missed = np.zeros(config.scheduler.max_num_seqs, np.int32)  # tokens computed by steps without drafts

    def prepare(self, model: LanguageModel) -> None:
        config, given = self.config, self.config.speculative
        if not given.model:
            raise ValueError("speculative_config: a draft model needs its path or name; give it as 'model'")
        checkpoint = resolve_model(
            given.model,
            load_format=config.load.draft_format,
            revision=given.revision,
            download_dir=config.load.download_dir,
            remote_code=config.model.trust_remote_code,
        )
        hf_config = given.hf_config or load_hf_config(checkpoint)
        vocab_size = text_part(hf_config).get("vocab_size")
        if vocab_size != config.model.vocab_size:
            raise ValueError(
                f"speculative_config: {given.model} has a vocabulary of {vocab_size} tokens, the model that it drafts "
                f"for one of {config.model.vocab_size}; both must have the same tokens"
            )
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.model = load_model(
            checkpoint,
            hf_config,
            dtype,
            self.device,
            self.tp,
            progress=config.load.use_tqdm_on_load,
            threads=config.load.load_threads,
            max_model_len=config.model.max_model_len,
            quantization=given.quantization,
            trust_remote_code=config.model.trust_remote_code,
            moe_backend=config.device.moe_backend,
            longest=config.model.derived_max_model_len,
        )
        layers = self.model.cache_layers()
        if not layers or not all(layer.causal for layer in layers):
            raise ValueError(f"speculative_config: {given.model} does not predict each token from those before it")
        # Blocks behind a window are freed: by the time it has to catch up, others may own them.
        self.rests = all(layer.kv_cache_spec(config.cache.block_size, dtype).grows for layer in layers)

    def cache_layers(self) -> Sequence[CacheLayer]:
        return self.model.cache_layers()

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        limits = (self.config.speculative.max_model_len, self.model.max_positions)
        self.max_length = min([last_position + 1, *(limit for limit in limits if limit is not None)])
        self.finds = self.max_length <= last_position  # longer rows get no drafts
        self.runner = DraftRunner(state, backends, self.max_length - 1)
        if self.config.speculative.draft_sample_method == "probabilistic":
            rows, vocab_size = len(state.num_tokens), self.config.model.vocab_size
            dtype: torch.dtype = getattr(torch, self.config.model.dtype)
            self.sampled = SampledDrafts(rows, self.num_drafts, vocab_size, self.device, dtype)
        self.graphs = DraftGraphs(self._compute, len(state.num_tokens), self.device)
        if backends.supports_replay:
            self.recorded = RecordedSteps(self.model, backends, state.block_tables, state.block_sizes)

    def propose(self, step: DraftStep) -> None:
        plan = step.plan
        assert plan.num_drafts is not None
        # A token more than the step, in which a row that verified drafts computed one of certain use.
        behind = num_new = plan.num_tokens - plan.num_drafts + 1
        if self._missed.any():
            behind, num_new = self._catch_up(plan.rows, num_new)
        equal = bool((behind == TOKENS_BEHIND).all())
        if not (equal and self.graphs.run(plan.rows, TOKENS_BEHIND)):
            self._first_pass(plan.rows, behind, num_new)
        if not self.graphs.run(plan.rows, 0):
            self._compute(step.rows[: len(plan.rows)], 0)
        if self.finds:
            room = self.max_length + 1 - step.state.num_tokens
            step.state.num_found.copy_(room.clamp(0, self.num_drafts))

    def _catch_up(self, rows: np.ndarray, num_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens rows are behind, and how many of these they compute now, within what a step may have."""
        behind = num_new + self._missed[rows]
        more = np.clip(self._max_tokens - num_new.sum() - np.cumsum(behind - num_new), num_new - behind, 0)
        self._missed[rows] = -more
        return behind, behind + more

    def skip(self, plan: SchedulerOutput) -> None:
        if self.rests:
            self._missed[plan.rows] += plan.num_tokens

    def remove_row(self, row: int) -> None:
        self._missed[row] = 0

    def _first_pass(self, rows: np.ndarray, behind: np.ndarray, num_new: np.ndarray) -> None:
        runner = self.runner
        more = (behind, np.cumsum(num_new) - 1)
        batch, (behind_, last) = StepBatch.planned(rows, num_new, runner.backends, self.device, more)
        runner.begin_rows(batch.rows, behind_)
        self._append(0, self._forward(batch)[last.long()], batch.rows)

    def _compute(self, rows: torch.Tensor, tokens_per_row: int) -> None:
        """The first pass over rows of as many tokens, or, if that is 0, the passes after it."""
        if tokens_per_row:
            self.runner.begin(tokens_per_row)
            hidden = self._forward(StepBatch.of_equal(rows, tokens_per_row))
            self._append(0, hidden.view(len(rows), tokens_per_row, -1)[:, -1].contiguous(), rows)
            return
        batch = StepBatch.of_equal(rows, 1)
        for index in range(1, self.num_drafts):
            self._append(index, self._forward(batch), rows)

    def _append(self, index: int, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        """Draft `index` of rows [n] by the hidden states [n, hidden] of the tokens before."""
        logits, runner = self.model.compute_logits(hidden), self.runner
        if self.sampled is None:
            runner.append_likeliest(logits, rows)
        else:
            runner.append(self.sampled.draw(index, logits, rows, runner.state, self.parameters), rows)

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states of all tokens."""
        inputs = self.runner.prepare(batch)
        if self.recorded is not None:
            results = self.recorded.run(batch.rows, batch.query_start, inputs, 0)
            if results is not None:
                return results[0]
        return self.model(inputs.input_ids, inputs.positions, self.runner.context(batch, inputs))

    def launch_kernels(self, row_counts: Sequence[int], max_tokens: int) -> None:
        self.runner.collecting = True
        with self.model.one_layer_of_each_kind():
            for num_tokens in (16, *self.model.kernel_row_counts):
                if num_tokens <= max_tokens:
                    self.run_padding(num_tokens)
            for num_rows in row_counts:
                rows = torch.full((num_rows,), -1, dtype=torch.int32, device=self.device)
                self._compute(rows, TOKENS_BEHIND)
                self._compute(rows, 0)
        self.runner.collecting = False

    def run_padding(self, num_tokens: int) -> None:
        num_rows = min(num_tokens, len(self.runner.num_tokens))
        batch = StepBatch.padding(num_rows, num_tokens + num_rows, self.runner.backends, self.device)
        self._append(0, self._forward(batch)[:num_rows], batch.rows)

    def capture_graphs(self, row_counts: Sequence[int]) -> None:
        self.graphs.capture(row_counts if self.model.capturable else (), (TOKENS_BEHIND, 0))
