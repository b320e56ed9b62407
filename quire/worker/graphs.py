"""Steps as CUDA graphs: one launch instead of hundreds.

There is a graph per step size: by number of rows for decode steps, by number of tokens for mixed ones. All are captured
at start-up, in about a second, and a step is padded to the smallest that fits. Larger steps are launched kernel by
kernel: the device is busy long enough to hide the launches.
"""

import contextlib
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from quire.attention.group_backends import GroupBackends
from quire.kernels.transfer import aligned, write_to

logger = logging.getLogger("quire")

Result = TypeVar("Result")

DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
MIXED_ROWS = 64
MISSES_BEFORE_CAPTURE = 2  # for keys that are not captured at start-up


@dataclass(frozen=True)
class GraphKey:
    num_tokens: int
    num_rows: int
    decode_only: bool
    shared_prefix: bool = False
    tokens_per_row: int = 1  # of decode steps: more than 1 where rows verify drafts
    adapters: bool = False  # whether linear layers add the terms of adapters


@dataclass
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # every replay writes it here


class StepBuffers:
    """Inputs of captured steps, at fixed addresses; filled before each replay."""

    def __init__(self, max_rows: int, max_tokens: int, max_query_blocks: Sequence[int], device: torch.device) -> None:
        """`max_query_blocks`: by distinct backend."""
        blocks = [2 * count for count in max_query_blocks]
        sizes = [aligned(n) for n in (1, max_rows, max_rows + 1, max_rows, max_tokens, *blocks)]
        self.ints = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        parts = self.ints.split(sizes)
        self.prefix_len, self.rows, self.query_start, self.last_token, self.token_rows, *query_blocks = parts
        self.query_blocks = [part.view(-1, 2) for part in query_blocks]
        self.host = np.full(sum(sizes), -1, np.int32)
        self.host_parts = np.split(self.host, np.cumsum(sizes)[:-1])

    def fill_decode(self, rows: np.ndarray, bucket: int, prefix_len: int) -> None:
        length, row, *_ = self.host_parts
        length[0] = prefix_len
        row[: len(rows)], row[len(rows) : bucket] = rows, -1
        write_to(self.ints, self.host[: len(length) + bucket])

    def fill(self, rows: np.ndarray, num_tokens: np.ndarray, query_blocks: Sequence[np.ndarray | None]) -> None:
        """`query_blocks`: by distinct backend."""
        _, row, start, last, token_rows, *parts = self.host_parts
        n, total = len(rows), int(num_tokens.sum())
        row[:n], row[n:] = rows, -1
        start[0] = 0
        np.cumsum(num_tokens, out=start[1 : n + 1])
        start[n + 1 :] = total
        last[:n], last[n:] = start[1 : n + 1] - 1, 0
        token_rows[:total], token_rows[total:] = np.repeat(np.arange(n), num_tokens), -1
        for part, blocks in zip(parts, query_blocks, strict=True):
            if blocks is not None:
                part[: blocks.size], part[blocks.size :] = blocks.reshape(-1), -1
        write_to(self.ints, self.host)


def graph_sizes(
    max_rows: int, max_tokens: int, wanted: Sequence[int] | None = None, largest: int | None = None
) -> tuple[list[int], list[int]]:
    """Rows of decode steps and tokens of mixed steps for which graphs are captured: `wanted` or the default ones, up to
    `largest`. Steps above the largest are launched kernel by kernel."""
    if wanted is None:
        decode, mixed = [n for n in DECODE_ROWS if n < max_rows] + [max_rows], list(MIXED_TOKENS)
    else:
        decode = sorted(set(wanted))
        mixed = [n for n in decode if n >= MIXED_TOKENS[0]]  # a graph for many rows has many tokens
    most = largest if largest is not None else max(max_rows, max_tokens)
    return [n for n in decode if n <= min(max_rows, most)], [n for n in mixed if n <= min(max_tokens, most)]


class StepGraphs:
    def __init__(
        self,
        compute: Callable[[GraphKey, StepBuffers], torch.Tensor],
        backends: GroupBackends,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        reset_workspaces: Callable[[], None],
        num_drafts: int = 0,
        adapters: bool = False,
        sizes: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """`compute` runs a step of the key's size from the buffers and returns its logits [rows, vocab], or hidden
        states [tokens, hidden]. `reset_workspaces` is called after a capture that failed. `adapters`: steps may have
        some, so each size is captured with and without. `sizes`: of `graph_sizes`."""
        self.compute = compute
        self.backends = backends
        self.reset_workspaces = reset_workspaces
        self.device = device
        self.decode_rows, self.mixed_tokens = sizes or graph_sizes(max_rows, max_tokens)
        # Without drafts for any row, or with the most for all; other steps are rare.
        self.tokens_per_row = sorted({1, 1 + num_drafts}, reverse=True)
        self.adapters = (False, True) if adapters else (False,)
        self.mixed_rows = min(MIXED_ROWS, max_rows)
        max_mixed_tokens = self.mixed_tokens[-1] if self.mixed_tokens else 0
        self.decode_buffers = StepBuffers(max_rows, 0, (), device)
        max_blocks = backends.max_query_blocks(max_mixed_tokens, self.mixed_rows)
        self.mixed_buffers = StepBuffers(self.mixed_rows, max_mixed_tokens, max_blocks, device)
        self.num_replays = 0
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._misses: Counter[GraphKey] = Counter()
        self._uncapturable: set[GraphKey] = set()  # capture has failed: such steps are launched kernel by kernel
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture_at_start(self, largest_only: bool = False) -> None:
        """Largest first: the others reuse its memory from the pool."""
        began = time.perf_counter()
        sizes = slice(-1, None) if largest_only else slice(None)
        for adapters in reversed(self.adapters):
            for count in self.tokens_per_row:
                for num_rows in reversed(self.decode_rows[sizes]):
                    self._capture(GraphKey(num_rows * count, num_rows, True, tokens_per_row=count, adapters=adapters))
            for num_tokens in reversed(self.mixed_tokens[sizes]):
                self._capture(GraphKey(num_tokens, self.mixed_rows, decode_only=False, adapters=adapters))
        logger.debug("%d graphs captured in %.2f s", len(self._captured), time.perf_counter() - began)

    @property
    def max_growth(self) -> float:
        """The number of graphs that may ever be captured, relative to those captured now."""
        sizes = (1 + len(self.tokens_per_row)) * len(self.decode_rows) + len(self.mixed_tokens)
        return len(self.adapters) * sizes / max(1, len(self._captured))

    def run_decode(
        self, rows: np.ndarray, prefix_len: int, tokens_per_row: int = 1, adapters: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows and results of all tokens, both padded, of a step of as many tokens in each row; None if there is no
        graph for it (yet)."""
        at = bisect_left(self.decode_rows, len(rows))
        if at == len(self.decode_rows) or tokens_per_row not in self.tokens_per_row:
            return None
        bucket = self.decode_rows[at]
        key = GraphKey(bucket * tokens_per_row, bucket, True, prefix_len > 0, tokens_per_row, adapters)
        if key not in self._captured and not self._capture_if_frequent(key):
            return None
        self.decode_buffers.fill_decode(rows, bucket, prefix_len)
        return self._replay(key, self.decode_buffers)

    def run_mixed(
        self, rows: np.ndarray, num_tokens: np.ndarray, adapters: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same for a step in which rows have several tokens."""
        at = bisect_left(self.mixed_tokens, int(num_tokens.sum()))
        if at == len(self.mixed_tokens) or len(rows) > self.mixed_rows:
            return None
        self.mixed_buffers.fill(rows, num_tokens, self.backends.plan_queries(num_tokens))
        key = GraphKey(self.mixed_tokens[at], self.mixed_rows, decode_only=False, adapters=adapters)
        return self._replay(key, self.mixed_buffers)

    def _capture_if_frequent(self, key: GraphKey) -> bool:
        """Whether the graph exists now."""
        self._misses[key] += 1
        if key in self._uncapturable or self._misses[key] < MISSES_BEFORE_CAPTURE:
            return False
        try:
            self._capture(key)
        except Exception as error:
            self._uncapturable.add(key)
            logger.warning("steps of %s will be launched kernel by kernel, as no graph can be captured: %s", key, error)
            # The allocator may still regard the old pool, or the driver the stream, as part of a capture.
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            self.reset_workspaces()
            return False
        return True

    def _replay(self, key: GraphKey, buffers: StepBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._captured[key]
        step.graph.replay()
        self.num_replays += 1
        return buffers.rows[: key.num_rows], step.result

    def _capture(self, key: GraphKey) -> None:
        buffers = self.decode_buffers if key.decode_only else self.mixed_buffers
        no_rows = np.empty(0, np.int32)  # padding only: no row's state advances
        if key.decode_only:
            buffers.fill_decode(no_rows, key.num_rows, 0)
        else:
            buffers.fill(no_rows, no_rows, [no_rows] * len(self.backends.distinct))
        graph, result = capture(lambda: self.compute(key, buffers), self.device, self._stream, self._pool)
        self._captured[key] = CapturedStep(graph, unowned(result))


def capture(
    compute: Callable[[], Result], device: torch.device, stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of what `compute` launches, and its result, which every replay writes again."""
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            compute()  # warm-up: nothing may be compiled or loaded during the capture
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = compute()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        current.wait_stream(stream)
    return graph, result


class _Memory:
    """Device memory at an address, by the interface that CUDA libraries share."""

    def __init__(self, tensor: torch.Tensor, typestr: str, itemsize: int) -> None:
        size = tensor.numel() * tensor.element_size() // itemsize
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": typestr, "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip


def unowned(result: torch.Tensor) -> torch.Tensor:
    """A view that does not own its memory, so that graphs captured next reuse it: all share a pool, run one after the
    other on one stream, and a step's result is sampled or pooled before the next step runs. Otherwise each graph would
    keep its own, 2 GB in all with a vocabulary of 152k. The pool lives as long as one of its graphs."""
    if not result.is_cuda or not result.is_contiguous():
        return result
    words = torch.as_tensor(_Memory(result, "<i2", 2), device=result.device)
    return words.view(result.dtype).view(result.shape)
