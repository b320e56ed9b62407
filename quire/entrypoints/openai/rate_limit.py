"""So many requests, and so many tokens, per interval for each client."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entrypoints.openai.errors import ApiError, retry
from quire.entrypoints.openai.middleware import OPEN_PATHS, path_of

MAX_CLIENTS = 65536  # remembered; the one not seen for longest is forgotten first


@dataclass(slots=True)
class Window:
    began: float
    requests: int = 0
    tokens: int = 0


class RateLimit:
    """A client is an API key, or an address where there are no keys. Tokens are known only at the end of a request: who
    has used up an interval's waits for the next one."""

    def __init__(
        self,
        app: ASGIApp,
        interval: float,
        requests: int | None,
        tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.interval = interval
        self.requests = requests
        self.tokens = tokens
        self.clock = clock
        self.windows: OrderedDict[bytes | str, Window] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) not in OPEN_PATHS:
            client = scope.get("quire.key") or (scope["client"][0] if scope.get("client") else "")
            window = self._window(client)
            self._check(window)
            window.requests += 1

            def charge(tokens: int) -> None:
                self._window(client).tokens += tokens

            scope["quire.charge"] = charge
        await self.app(scope, receive, send)

    def _window(self, client: bytes | str) -> Window:
        now = self.clock()
        window = self.windows.get(client)
        if window is None or now - window.began >= self.interval:
            window = self.windows[client] = Window(now)
        self.windows.move_to_end(client)
        if len(self.windows) > MAX_CLIENTS:
            self.windows.popitem(last=False)
        return window

    def _check(self, window: Window) -> None:
        for kind, used, limit in (
            ("requests", window.requests, self.requests),
            ("tokens", window.tokens, self.tokens),
        ):
            if limit is not None and used >= limit:
                left = window.began + self.interval - self.clock()
                message = f"{used} {kind} within {self.interval:g} seconds; the limit is {limit}"
                raise ApiError(429, message, type=kind, code="rate_limit_exceeded", headers=retry(left))
