"""The scheduler's plan for one step, and the model runner's output.

The worker keeps a row of state per request, so a plan holds only changes since the last one, and the number of tokens
scheduled per row.
"""

from dataclasses import dataclass, field

import numpy as np

from quire.messages.features import Feature, FeaturePlan
from quire.messages.kv_transfer import ConnectorMetadata, FinishedTransfers
from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import Logprobs, PromptLogprobs
from quire.messages.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRow:
    """A request is assigned a row: for the first time, or when resumed after preemption."""

    row: int
    request_id: str
    token_ids: np.ndarray  # int32: prompt, and tokens generated before a preemption
    num_computed: int
    block_ids: list[list[int]]  # per group
    params: SamplingParams  # of a row that pools NO_SAMPLING
    seed: int
    num_prompt_tokens: int
    stop_ids: list[int]  # tokens that finish it
    token_limit: int  # the most tokens it may have: prompt and max_tokens, or max_model_len; its prompt if it pools
    pooling: PoolingParams | None = None  # the row pools: nothing is drawn for it
    lora_id: int = 0  # of its adapter; 0: none
    features: tuple[Feature, ...] = ()  # of its prompt
    cache_salt: str | None = None  # what is kept of its text serves only requests with the same


@dataclass(slots=True)
class BlockAppends:
    """Blocks appended to running rows: four columns of equal length."""

    rows: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # index in the row's block table
    block_ids: list[int] = field(default_factory=list)

    def add(self, row: int, group: int, position: int, block_id: int) -> None:
        self.rows.append(row)
        self.groups.append(group)
        self.positions.append(position)
        self.block_ids.append(block_id)

    def drop_rows(self, rows: list[int]) -> None:
        kept = [i for i, row in enumerate(self.rows) if row not in rows]
        columns = (self.rows, self.groups, self.positions, self.block_ids)
        self.rows, self.groups, self.positions, self.block_ids = ([column[i] for i in kept] for column in columns)


@dataclass(slots=True)
class SchedulerOutput:
    step: int
    rows: np.ndarray  # [n] int32
    num_tokens: np.ndarray  # [n] int32: scheduled tokens per row
    finished_rows: list[int]  # rows to free, before new ones are assigned
    new_rows: list[NewRow]
    appended: BlockAppends
    block_copies: list[tuple[int, int]]  # (source, destination), before any KV is written
    common_prefix_blocks: tuple[int, ...]  # per group, leading blocks of the same content in all rows
    connector_meta: tuple[ConnectorMetadata | None, ...] = ()  # by KV connector; None: it starts nothing
    num_drafts: np.ndarray | None = None  # [n] int32: how many of num_tokens are drafts to verify; None: no row has any
    features: FeaturePlan | None = None  # None: no token of the step depends on one

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class GrammarMask:
    """Tokens that grammars allow, for some of a plan's rows."""

    places: np.ndarray  # [m] int64: indices into the logits, of which a row has one, and one for each of its drafts
    bitmask: np.ndarray  # [m, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 allows token t


class DeviceLostError(RuntimeError):
    """The device is unusable after a failed step: the engine must exit."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """One result per plan row. The sampled token is discarded for rows with known tokens left to compute and for
    rows that pool; where all rows pool there is none."""

    token_ids: np.ndarray  # [n, 1 + k] int32
    num_sampled: np.ndarray  # [n] int32
    logprobs: Logprobs | None = None
    drafts: np.ndarray | None = None  # [n, k] int32: for the next step, if a row has a grammar
    num_found: np.ndarray | None = None  # [n] int32: drafts found for the next step; None: as many as may be
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)  # float32, by plan row that pools and is done
    transfers: tuple[FinishedTransfers, ...] = ()  # by KV connector
