"""Who may watch the engine."""

import ipaddress

from starlette.requests import Request

from quire.config.server import ServerConfig

FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_public(config: ServerConfig) -> bool:
    """Whether others than the users of this machine can connect."""
    return config.uds is None and not is_loopback(config.host)


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
    same_site = request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    if not same_site or not is_loopback(request.url.hostname or ""):
        return "the live view needs --enable-admin, or a request to this machine's own address, such as 127.0.0.1"
    return None
