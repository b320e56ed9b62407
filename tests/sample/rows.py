"""Rows and batches as the runner would make them."""

import numpy as np
import torch

from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import SampleBatch


def new_row(row: int, params: SamplingParams, tokens=(1,), num_prompt=None, stop_ids=()) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=np.asarray(tokens, np.int32),
        num_computed=0,
        block_ids=[],
        params=params,
        seed=params.seed or 0,
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        stop_ids=list(stop_ids),
        token_limit=1 << 20,
    )


def batch(rows, position=0, done=None, token_ids=None) -> SampleBatch:
    n = len(rows)
    return SampleBatch(
        rows=torch.tensor(rows),
        row_list=list(rows),
        positions=torch.full((n,), position),
        done=torch.ones(n, dtype=torch.bool) if done is None else torch.tensor(done),
        token_ids=torch.zeros(8, 64, dtype=torch.int32) if token_ids is None else token_ids,
    )
