"""The HTTP server, independent of any API dialect: connections, limits, jobs, processes, operators' endpoints."""
