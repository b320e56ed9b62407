"""A pytest plugin that keeps a fifth of the cases of each parametrized test: the interpreter takes seconds for one."""

import os
from itertools import groupby

import pytest

KEPT = 5  # every fifth, and the last; not 2, 3, 4 or 6, by which parameters repeat


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("QUIRE_ALL_KERNELS"):
        return
    kept: list[pytest.Item] = []
    for _, group in groupby(list(items), key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        kept += [case for i, case in enumerate(cases) if i % KEPT == 0 or i == len(cases) - 1]
    items[:] = kept
