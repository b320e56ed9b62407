"""API keys."""

import hashlib
import hmac
from collections.abc import Iterable

from quire.entrypoints.http.errors import ApiError


class KnownKeys:
    """The accepted API keys. Every one is compared, each in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: str, x_api_key: str) -> bytes:
        """The digest of the key in one of these headers; an error without a known one."""
        scheme, _, bearer = authorization.partition(" ")
        sent = [bearer if scheme.lower() == "bearer" else "", x_api_key]
        known = [self._known(key.strip().encode("latin-1", "replace")) for key in sent]  # the headers' own bytes
        digest = known[0] or known[1]
        if digest is None:
            missing = "no API key was sent; use the header Authorization: Bearer KEY, or x-api-key: KEY"
            message = "the API key is not known" if any(sent) else missing
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest

    def _known(self, key: bytes) -> bytes | None:
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self.digests]
        return given if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
