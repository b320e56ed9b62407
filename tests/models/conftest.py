from tests.models import gemma3_weights

# Real weights are there once `make test-models` has installed them.
collect_ignore = [] if gemma3_weights.is_installed() else ["test_gemma3_real.py"]
