"""Who may watch the engine."""

from starlette.requests import Request

from quire.config.server import ServerConfig
from quire.entrypoints.http.exposure import is_cross_site, is_loopback, is_public

FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


def why_not(request: Request, config: ServerConfig, has_keys: bool) -> str | None:
    """Why this request may not watch; None if it may."""
    if is_public(config) and not has_keys:
        return "the server is open to the network and has no API keys; set one (--api-key) and --enable-admin"
    if config.enable_admin:
        return None
    if config.uds is not None or is_public(config):
        return "the live view needs --enable-admin, or a server that listens on 127.0.0.1 alone"
    if any(name in request.headers for name in FORWARDED):
        return "the live view needs --enable-admin where a proxy stands in front of the server"
    # Another site's page, or its name that resolves to this machine, is not the person at this machine.
    if is_cross_site(request) or not is_loopback(request.url.hostname or ""):
        return "the live view needs --enable-admin, or a request to this machine's own address, such as 127.0.0.1"
    return None
