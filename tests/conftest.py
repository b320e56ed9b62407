import os

import pytest
from hypothesis import settings

# Tests compare numbers, not speed; two test processes must not fight for the cores. Threads that spin while they wait
# would take a fifth of them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: a machine that runs other tests beside is slow at times. What a change must pass is the same every time;
# everybody else looks at new examples, and `make test-properties` at many more (tests/properties.py).
settings.register_profile("random", deadline=None)
settings.register_profile("long", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "random"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: one that begins last would keep a single process busy while the others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
