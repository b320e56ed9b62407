"""Hidden states to vectors, for requests that do not generate."""
