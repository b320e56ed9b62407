import os

from hypothesis import settings

# Tests compare numbers, not speed; two test processes must not fight for the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: a machine that runs other tests beside is slow at times. What a change must pass is the same every time;
# everybody else looks at new examples, and `make test-properties` at many more (tests/properties.py).
settings.register_profile("random", deadline=None)
settings.register_profile("long", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "random"))
