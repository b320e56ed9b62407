"""How far property tests look."""

import os

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
SEARCH = 20 if LONG else 1  # times the examples of an ordinary run
