"""Structured output: grammars compiled off the step loop, a matcher per request, token bitmasks for the sampler."""
