"""The HTTP server without a dialect: connections, limits, jobs, processes, and the endpoints of operators."""
