"""Memory of weights and KV cache that an engine gives back while it sleeps, at addresses that stay."""
