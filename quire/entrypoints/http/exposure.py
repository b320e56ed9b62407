"""Who can reach a server: the users of its machine, or others too; and whether a request is another site's."""

import ipaddress

from starlette.requests import Request

from quire.config.server import ServerConfig


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


def is_cross_site(request: Request) -> bool:
    """Whether a browser sends it for a page of another site."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
