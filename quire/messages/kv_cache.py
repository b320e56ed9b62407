"""Kinds of KV cache, what a page of each holds, and the layout of a model's cache.

`make_groups` is here because core and worker both need it: the core to lay out the cache, the worker to measure memory
before there is a layout.

A kind is a subclass of KVCacheSpec here, a group class in core/kv_groups.py and a backend in attention/ that reads it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import numpy as np

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
PAGE_ALIGNMENT = 16  # bytes, of pages that kinds of different sizes share
MAX_GROWTH = 16  # of the length at which prefix hits can end, for all kinds to fill a page exactly
GROUP_COST = 0.02  # a group's tables and metadata, as a fraction of the cache that it is worth wasting to save it

Spec = TypeVar("Spec", bound="KVCacheSpec")
AttentionSpec = TypeVar("AttentionSpec", bound="FullAttentionSpec")


@dataclass(frozen=True)
class PagePart:
    """One tensor within a page."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's cache: a page holds what `block_size` tokens leave behind."""

    block_size: int

    scales: ClassVar[bool] = True  # a larger page holds more tokens
    grows: ClassVar[bool] = True  # a request holds the pages of all its tokens
    rolls_back: ClassVar[bool] = True  # what rejected drafts wrote is overwritten by the tokens after them
    token_axis: ClassVar[int | None] = None  # of every part
    head_axis: ClassVar[int | None] = None  # of every part, if ranks have heads of their own; else they have all of it

    @property
    def window(self) -> int | None:
        """Tokens that a query reads, itself among them; None: all before it."""
        return None

    def parts(self, num_tokens: int | None = None) -> tuple[PagePart, ...]:
        """The tensors of a page of `num_tokens`, by default of a block, one after the other. The first is the one that
        kernels without scales know."""
        raise NotImplementedError

    @property
    def chunkable(self) -> bool:
        """Whether a prompt may be computed in several steps, and its blocks reused by other requests."""
        return True

    def offsets(self, num_tokens: int | None = None) -> tuple[int, ...]:
        """Where in a page each part begins, at a multiple of its items' bytes, and where the last ends."""
        offsets, end = [], 0
        for part in self.parts(num_tokens):
            begin = _round_up(end, ITEM_BYTES[part.dtype])
            offsets.append(begin)
            end = begin + part.nbytes
        return (*offsets, end)

    @property
    def page_bytes(self) -> int:
        """Without padding."""
        return self.offsets()[-1]

    def with_scales(self: Spec, dtype: str) -> Spec:
        """With a scale for each vector, if it holds vectors."""
        return self

    def times(self: Spec, count: int) -> Spec:
        """With as many times its tokens, if it holds tokens."""
        return replace(self, block_size=self.block_size * count) if self.scales else self

    # Conversions of pages, uint8 [pages, page_bytes]: what engines of other layouts have written can be read.

    def of_rank(self: Spec, num_ranks: int) -> Spec:
        """One rank's kind, if `num_ranks` share what this one holds."""
        return self

    def split(self, pages: np.ndarray, num_ranks: int) -> list[np.ndarray]:
        """The pages of each of `num_ranks`."""
        part, axis = self.of_rank(num_ranks), self.head_axis
        if axis is None:
            return [pages] * num_ranks
        fields = self._fields(pages)
        held, heads = part.parts()[0].shape[axis], self.parts()[0].shape[axis]
        firsts = [rank * heads // num_ranks for rank in range(num_ranks)]
        return [part._join_fields([f.take(range(first, first + held), axis + 1) for f in fields]) for first in firsts]

    def join(self, pages: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of `split`, from the pages of every rank."""
        part, axis = self.of_rank(len(pages)), self.head_axis
        if axis is None:
            return pages[0]
        held, heads = part.parts()[0].shape[axis], self.parts()[0].shape[axis]
        # Of ranks that have the same heads, the first.
        fields = [part._fields(pages[first * len(pages) // heads]) for first in range(0, heads, held)]
        return self._join_fields([np.concatenate(same, axis + 1) for same in zip(*fields, strict=True)])

    def regroup(self, pages: np.ndarray, block_size: int) -> np.ndarray:
        """Consecutive pages as pages of another block size, whose tokens they must fill."""
        axis = self.token_axis
        if axis is None:
            raise ValueError(f"pages of kind {type(self).__name__} hold no tokens that could be regrouped")
        num_tokens = len(pages) * self.block_size
        if num_tokens % block_size:
            raise ValueError(f"{num_tokens} tokens do not fill blocks of {block_size}")
        other = replace(self, block_size=block_size)
        count = num_tokens // block_size
        return other._join_fields(
            [
                np.moveaxis(
                    np.moveaxis(f, axis + 1, 1).reshape(count, block_size, *_without(f.shape, axis)), 1, axis + 1
                )
                for f in self._fields(pages)
            ]
        )

    def _fields(self, pages: np.ndarray) -> list[np.ndarray]:
        """[pages, *shape, bytes of an item] of each part."""
        return [
            pages[:, begin : begin + part.nbytes].reshape(len(pages), *part.shape, ITEM_BYTES[part.dtype])
            for begin, part in zip(self.offsets(), self.parts(), strict=False)
        ]

    def _join_fields(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        pages = np.zeros((len(fields[0]), self.page_bytes), np.uint8)
        for begin, part, values in zip(self.offsets(), self.parts(), fields, strict=False):
            pages[:, begin : begin + part.nbytes] = values.reshape(len(pages), -1)
        return pages


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of all tokens."""

    num_kv_heads: int
    head_size: int
    dtype: str
    scale_dtype: str | None = None  # of a scale for each token and head, inside the page; None: there are none
    causal: bool = True

    token_axis: ClassVar[int | None] = 2
    head_axis: ClassVar[int | None] = 1

    def parts(self, num_tokens: int | None = None) -> tuple[PagePart, ...]:
        by_token = (2, self.num_kv_heads, num_tokens or self.block_size)
        vectors = PagePart((*by_token, self.head_size), self.dtype)
        return (vectors,) if self.scale_dtype is None else (vectors, PagePart(by_token, self.scale_dtype))

    def with_scales(self, dtype: str) -> "FullAttentionSpec":
        return replace(self, scale_dtype=dtype)

    def of_rank(self: AttentionSpec, num_ranks: int) -> AttentionSpec:
        return replace(self, num_kv_heads=_heads_of_rank(self.num_kv_heads, num_ranks))

    @property
    def chunkable(self) -> bool:
        return self.causal


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last tokens."""

    sliding_window: int = field(kw_only=True)  # keys that a query sees, itself among them

    grows: ClassVar[bool] = False

    @property
    def window(self) -> int | None:
        return self.sliding_window


@dataclass(frozen=True)
class LatentSpec(KVCacheSpec):
    """One vector a token, from which all heads' keys and values are made: a compressed part and a rotated one."""

    rank: int
    rope_size: int
    dtype: str
    scale_dtype: str | None = None  # of a scale for each token, inside the page; None: there are none
    index_size: int = 0  # of a key by which tokens are selected, beside the vector; 0: all are attended to

    token_axis: ClassVar[int | None] = 0

    def with_scales(self, dtype: str) -> "LatentSpec":
        return replace(self, scale_dtype=dtype)

    def parts(self, num_tokens: int | None = None) -> tuple[PagePart, ...]:
        count = num_tokens or self.block_size
        vectors = PagePart((count, self.rank + self.rope_size), self.dtype)
        scales = () if self.scale_dtype is None else (PagePart((count,), self.scale_dtype),)
        return (vectors, *scales, *((PagePart((count, self.index_size), self.dtype),) if self.index_size else ()))


@dataclass(frozen=True)
class StateSpec(KVCacheSpec):
    """A state of fixed size. Page i of a request holds the state after the last computed token of its block i: the last
    page is the live one, those before are checkpoints, one for every `block_size` tokens."""

    states: tuple[PagePart, ...]

    scales: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    rolls_back: ClassVar[bool] = False

    @property
    def window(self) -> int | None:
        return 2  # the state after the token before, which the page of that one's block holds

    def of_rank(self, num_ranks: int) -> "StateSpec":
        if num_ranks > 1:
            raise ValueError("states cannot be split between ranks: what of them belongs to which is not known here")
        return self

    def parts(self, num_tokens: int | None = None) -> tuple[PagePart, ...]:
        return self.states


@dataclass(frozen=True)
class CrossAttentionSpec(KVCacheSpec):
    """Keys and values of an encoder's output, written once. Declared only: no group allocates it yet."""

    num_kv_heads: int
    head_size: int
    dtype: str

    grows: ClassVar[bool] = False

    def parts(self, num_tokens: int | None = None) -> tuple[PagePart, ...]:
        return (PagePart((2, self.num_kv_heads, num_tokens or self.block_size, self.head_size), self.dtype),)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. Layer i of every group is backed by physical tensor i."""

    layers: tuple[int, ...]  # model layer indices
    spec: KVCacheSpec


@dataclass(frozen=True)
class DraftNeeds:
    """What a proposer of drafts needs of the cache, beside pages for its layers."""

    num_lookahead: int = 0  # positions behind a step's that its layers write
    recomputes_last_block: bool = False  # of a prefix hit (`KVCacheManager.find_hit`)


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` usable blocks; tensors hold one more, block 0, the null block."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def chunkable(self) -> bool:
        """Whether a prompt may be computed in several steps: they find each other's keys in the cache."""
        return bool(self.groups) and all(group.spec.chunkable for group in self.groups)

    @property
    def num_tensors(self) -> int:
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def page_bytes(self) -> int:
        return shared_page_bytes(self.groups)

    def part_of(self, layers: Collection[int]) -> "KVCacheConfig":
        """For a worker that has these layers: the same groups and blocks."""
        own = (tuple(layer for layer in group.layers if layer in layers) for group in self.groups)
        groups = (replace(group, layers=part) for group, part in zip(self.groups, own, strict=True))
        return replace(self, groups=tuple(groups))


def shared_page_bytes(groups: tuple[KVCacheGroup, ...]) -> int:
    """Of a page in the pool: a kind that does not fill it is padded."""
    sizes = {group.spec.page_bytes for group in groups} or {0}
    return max(sizes) if len(sizes) == 1 else _round_up(max(sizes), PAGE_ALIGNMENT)


def make_groups(specs: dict[int, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal kind so that one pool of equal pages serves all groups; none if nothing is kept.

    A kind with more layers than a group has is split, its last group padded. A kind with smaller tokens gets larger
    blocks until it fills a page; what does not divide is padded.
    """
    kinds: dict[KVCacheSpec, list[int]] = defaultdict(list)
    for layer, spec in sorted(specs.items()):
        kinds[spec].append(layer)
    if not kinds:
        return ()
    size = group_length([len(layers) for layers in kinds.values()])
    counts = _times(list(kinds))
    return tuple(
        KVCacheGroup(tuple(layers[i : i + size]), spec.times(counts[spec]))
        for spec, layers in kinds.items()
        for i in range(0, len(layers), size)
    )


def group_length(num_layers: list[int]) -> int:
    """Layers to a group, from those of each kind: what wastes least, counting groups as a waste of their own. So a
    kind of one layer does not make a group of every layer."""

    def cost(length: int) -> tuple[float, int]:
        groups = sum(-(-count // length) for count in num_layers)
        return 1 - sum(num_layers) / (groups * length) + GROUP_COST * groups, -length

    return min(range(1, max(num_layers) + 1), key=cost)


def _times(specs: list[KVCacheSpec]) -> dict[KVCacheSpec, int]:
    """How many times its tokens a page of each kind holds: so many that all fill it exactly, if hits can then still end
    often enough; else powers of two, which have small multiples in common, and padding."""
    largest = max(spec.page_bytes for spec in specs)
    page = _round_up(largest, math.lcm(*(spec.page_bytes for spec in specs if spec.scales)))
    exact = {spec: page // spec.page_bytes for spec in specs}
    if math.lcm(*(exact[spec] for spec in specs if spec.scales)) <= MAX_GROWTH:
        return exact
    return {spec: 1 << (largest // spec.page_bytes).bit_length() - 1 for spec in specs}


def _heads_of_rank(num_heads: int, num_ranks: int) -> int:
    """Ranks beyond the heads share them."""
    if num_heads % num_ranks and num_ranks % num_heads:
        raise ValueError(f"{num_heads} KV heads cannot be shared by {num_ranks} ranks: one must divide the other")
    return max(1, num_heads // num_ranks)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Of a page's field, its other axes: those before `axis` and those after it."""
    return (*shape[1 : axis + 1], *shape[axis + 2 :])


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
