"""Rate limits: requests and tokens per client and interval, in fixed windows."""

import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.entrypoints.http.errors import ApiError, retry
from quire.entrypoints.http.paths import path_of
from quire.entrypoints.http.process_messages import RateLimitExceeded

MAX_CLIENTS = 65536  # tracked; the least recently seen is evicted


@dataclass(slots=True)
class Window:
    began: float
    requests: int = 0
    tokens: int = 0


class RateLimiter(Protocol):
    async def acquire(self, client: bytes, count: int) -> RateLimitExceeded | None:
        """Count `count` more requests of this client, unless that exceeds its limit."""
        ...

    def charge(self, client: bytes, tokens: int) -> None: ...


class FixedWindowLimiter:
    """Each client's usage in its current window. Tokens are charged when a request ends, so a request is refused only
    once the window's tokens are already used up."""

    def __init__(
        self,
        interval: float,
        requests: int | None,
        tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = interval
        self.requests = requests
        self.tokens = tokens
        self.clock = clock
        self.windows: OrderedDict[bytes, Window] = OrderedDict()

    @classmethod
    def of(cls, config: ServerConfig) -> "FixedWindowLimiter | None":
        """None if no rate limit is configured."""
        if config.rate_limit_requests is None and config.rate_limit_token is None:
            return None
        return cls(config.rate_limit_interval, config.rate_limit_requests, config.rate_limit_token)

    async def acquire(self, client: bytes, count: int) -> RateLimitExceeded | None:
        return self.acquire_now(client, count)

    def acquire_now(self, client: bytes, count: int = 1) -> RateLimitExceeded | None:
        """A request counts as many times as it has sequences."""
        window = self._window(client)
        for kind, used, more, limit in (
            ("requests", window.requests, count, self.requests),
            ("tokens", window.tokens, 1, self.tokens),
        ):
            if limit is not None and used + more > limit:
                requested = f" and {more} requested" if more > 1 else ""
                message = f"{used} {kind} used{requested} within {self.interval:g} seconds; the limit is {limit}"
                return RateLimitExceeded(kind, message, window.began + self.interval - self.clock())
        window.requests += count
        return None

    def charge(self, client: bytes, tokens: int) -> None:
        self._window(client).tokens += tokens

    def _window(self, client: bytes) -> Window:
        now = self.clock()
        window = self.windows.get(client)
        if window is None or now - window.began >= self.interval:
            window = self.windows[client] = Window(now)
        self.windows.move_to_end(client)
        if len(self.windows) > MAX_CLIENTS:
            self.windows.popitem(last=False)
        return window


class RateLimit:
    """Middleware. A client is an API key, or an address if the server has no keys."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter, open_paths: frozenset[str]) -> None:
        self.app = app
        self.open_paths = open_paths
        self.limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) not in self.open_paths:
            await limit_client(self.limiter, scope)
        await self.app(scope, receive, send)


async def limit_client(limiter: RateLimiter, scope: MutableMapping[str, Any]) -> None:
    """Count a request of the scope's client. More sequences are counted, and tokens charged, by what is put there."""
    address = scope["client"][0] if scope.get("client") else ""
    client: bytes = scope.get("quire.key") or address.encode()

    async def acquire(count: int) -> None:
        refusal = await limiter.acquire(client, count)
        if refusal is not None:
            headers = retry(refusal.seconds_left)
            raise ApiError(429, refusal.message, type=refusal.kind, code="rate_limit_exceeded", headers=headers)

    await acquire(1)
    scope["quire.acquire"] = acquire
    scope["quire.charge"] = lambda tokens: limiter.charge(client, tokens)
