import os

# Tests compare numbers, not speed; two test processes must not fight for the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
