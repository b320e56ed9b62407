"""OpenAI's endpoints, with vLLM's additions: a dialect of the server in `entrypoints/http/`."""
