import numpy as np
import torch

from quire.messages.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LatentSpec,
    PagePart,
    StateSpec,
    make_groups,
)
from quire.messages.plan import BlockAppends
from quire.messages.sampling_params import SamplingParams
from quire.worker.cache_pages import new_pages, page_views
from quire.worker.rows import RowState
from tests.sample.rows import new_row

CPU = torch.device("cpu")


def test_a_kind_that_fills_its_pages_has_no_gaps():
    config = KVCacheConfig(5, make_groups({0: FullAttentionSpec(16, 2, 8, "bfloat16")}))
    (view,) = page_views(new_pages(config, CPU), config.groups[0].spec)
    assert view.shape == (6, 2, 2, 16, 8) and view.dtype is torch.bfloat16 and view.is_contiguous()


def test_kinds_see_different_pages_of_one_tensor():
    specs = {0: FullAttentionSpec(16, 3, 8, "float32"), 1: LatentSpec(16, 5, 2, "bfloat16")}
    config = KVCacheConfig(3, make_groups({**specs, 2: StateSpec(64, (PagePart((5,), "float32"),))}))
    pages = new_pages(config, CPU)
    views = [page_views(pages, group.spec)[0] for group in config.groups]
    for view in views[1:]:
        assert view.stride(0) * view.itemsize == config.page_bytes
    for block, view in enumerate(views):
        view[block + 1] = 1.0
    for block, view in enumerate(views):
        others = [i for i in range(len(views)) if i != block]
        assert (view[block + 1] == 1).all()
        assert all((views[i][block + 1].view(torch.uint8) != 0).any() for i in others)
        assert (view[0] == 0).all()  # the null block


def test_scales_and_vectors_do_not_overlap():
    spec = FullAttentionSpec(16, 1, 6, "int8", scale_dtype="float32")
    config = KVCacheConfig(4, (KVCacheGroup((0,), spec),))
    for count in (1, 4):
        vectors, scales = page_views(new_pages(config, CPU), spec, count)
        assert vectors.shape == (5 * count, 2, 1, 16 // count, 6) and scales.shape == (5 * count, 2, 1, 16 // count)
        x = torch.randn(vectors.shape)
        scales.copy_(x.abs().amax(-1) / 127)
        vectors.copy_((x / scales[..., None]).round())
        torch.testing.assert_close(vectors * scales[..., None], x, atol=0.03, rtol=0)


def test_tables_of_several_pages_to_a_block():
    config = KVCacheConfig(9, tuple(KVCacheGroup((i,), FullAttentionSpec(8, 1, 4, "float32")) for i in range(2)))
    state = RowState(3, 40, config, CPU, pages_per_block=[1, 4])
    assert state.block_sizes == [8, 2] and [table.shape for table in state.block_tables] == [(3, 5), (3, 20)]
    new = new_row(1, SamplingParams(), np.arange(9))
    new.block_ids = [[3, 5], [4, 2]]
    state.add([new])
    appended = BlockAppends()
    appended.add(1, 0, 2, 7)
    appended.add(1, 1, 2, 6)
    state.append_blocks(appended)
    assert state.block_tables[0][1].tolist() == [3, 5, 7, 0, 0]
    assert state.block_tables[1][1, :12].tolist() == [*range(16, 20), *range(8, 12), *range(24, 28)]
    assert not state.block_tables[1][[0, 2]].any() and not state.block_tables[1][1, 12:].any()
