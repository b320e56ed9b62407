"""Grammars beside the scheduler: compiled off the step loop, one matcher a request, token masks for the sampler."""
