"""How far property tests look."""

import os

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def examples(count: int) -> int:
    """Of a property: two fifths of `count`, or with `make test-properties` twenty times as many."""
    return 20 * count if LONG else max(10, 2 * count // 5)
