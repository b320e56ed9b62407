"""Adapters as models of a server: their names, and loading and unloading while it runs."""

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.config.server import ServerConfig
from quire.config.shown import shown
from quire.entrypoints.http.body import BodyReader
from quire.entrypoints.http.errors import ApiError, bad_request
from quire.entrypoints.http.peers import Peers
from quire.messages.lora import ADAPTER_FILES, CONFIG, MAX_LORA_ID, MAX_LORA_NAME, LoRARequest

_NAME = re.compile(r"[\w.:@+-][\w.:@+/ -]*")
MAX_ADAPTERS = 100_000  # names


class AdapterEngine(Protocol):
    async def add_lora(self, lora_request: LoRARequest) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...


class LoadRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


class ServedAdapters:
    """By name. All API processes of a server have the same: a name and a folder give a number that is theirs alone, and
    what is loaded in place of another gets a new one."""

    def __init__(self, config: ServerConfig, engine: Any, base_model: str, enabled: bool) -> None:
        self._config, self.base_model = config, base_model
        self.engine = cast(AdapterEngine, engine)
        self.enabled = enabled
        given = [self._parsed(text) for text in config.lora_modules]
        self._by_name = {lora.lora_name: lora for lora in given}
        if len(self._by_name) < len(given):
            raise ValueError("--lora-modules has a name twice; each adapter needs its own")
        if taken := self._by_name.keys() & {base_model, *config.served_model_name}:
            raise ValueError(f"--lora-modules: {shown(taken.pop())} is the name of the base model; choose another")
        if not enabled and (self._by_name or config.lora_folder):
            raise ValueError("--lora-modules and --lora-folder need --enable-lora")
        self._allowed = [Path(path).expanduser().resolve() for path in config.lora_allowed_paths]

    @property
    def all(self) -> list[LoRARequest]:
        return list(self._by_name.values())

    def get(self, name: str) -> LoRARequest | None:
        """Known by this name, or found in --lora-folder."""
        found = self._by_name.get(name)
        if found is None and self.enabled and self._config.lora_folder and re.fullmatch(r"[\w-][\w.-]*", name):
            folder = Path(self._config.lora_folder).expanduser() / name
            if len(name) <= MAX_LORA_NAME and os.path.isfile(folder / CONFIG):  # False for what no file can be
                found = _request(name, str(folder), self.base_model)
                self.register(found)
        return found

    async def load_all(self) -> None:
        """At the start, so that one that cannot be loaded ends it."""
        for lora in self.all:
            await self.engine.add_lora(lora)

    def register(self, lora: LoRARequest) -> None:
        if len(self._by_name) >= MAX_ADAPTERS:
            raise ValueError(f"there are {MAX_ADAPTERS} adapters; unload some first")
        self._by_name[lora.lora_name] = lora

    def forget(self, name: str) -> None:
        self._by_name.pop(name, None)

    def check_path(self, path: str) -> None:
        """Of the folder and of the files in it, which may be links."""
        try:
            folder = Path(path).expanduser()
            exists, places = folder.is_dir(), [(folder / file).resolve() for file in ("", *ADAPTER_FILES)]
        except (OSError, RuntimeError) as error:  # a name too long, links in a circle
            raise bad_request(f"lora_path {shown(path)} cannot be read: {error}", "lora_path") from None
        if self._allowed and not all(any(p.is_relative_to(one) for one in self._allowed) for p in places):
            raise bad_request(f"lora_path {shown(path)} is outside of --lora-allowed-paths", "lora_path")
        if not exists:
            raise ApiError(404, f"there is no folder {shown(path)}", param="lora_path", code="not_found")

    def _parsed(self, text: str) -> LoRARequest:
        """name=path, or vLLM's JSON object."""
        wrong = f'{shown(text)} must be name=path, or {{"name": ..., "path": ..., "base_model_name": ...}}'
        if text.lstrip().startswith("{"):
            try:
                found = json.loads(text)
                return _request(str(found["name"]), str(found["path"]), found.get("base_model_name") or self.base_model)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"--lora-modules: {wrong}: {error}") from None
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"--lora-modules: {wrong}")
        return _request(name, path, self.base_model)


def _request(name: str, path: str, base: str, before: LoRARequest | None = None) -> LoRARequest:
    """`before`: in place of which it is loaded."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"lora_name is {shown(name)}; allowed: letters, digits and ._:@+/- (not first)")
    digest = hashlib.sha256(f"{name}\0{path}\0{before.lora_int_id if before else 0}".encode()).digest()
    number = 1 + int.from_bytes(digest[:8], "little") % MAX_LORA_ID
    return LoRARequest(name, number, path, base_model_name=base)


class AdapterEndpoints:
    """Operators' routes, under vLLM's names."""

    def __init__(
        self, adapters: ServedAdapters, bodies: BodyReader, peers: Peers, model_names: tuple[str, ...]
    ) -> None:
        self._adapters, self._bodies, self._peers, self._models = adapters, bodies, peers, model_names
        self._loading: set[str] = set()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, http: Request) -> Response:
        request, _ = await self._bodies.read(http.scope, http.receive, LoadRequest)
        adapters, name = self._adapters, request.lora_name
        self._check_enabled()
        known = adapters.get(name)
        if name in self._models:
            raise bad_request(f"{shown(name)} is the name of the base model", "lora_name")
        if known is not None and not request.load_inplace:
            message = f"the adapter {shown(name)} is loaded already; load_inplace loads it anew"
            raise bad_request(message, "lora_name", "already_loaded")
        if name in self._loading:
            raise bad_request(f"the adapter {shown(name)} is being loaded", "lora_name", "already_loaded")
        self._loading.add(name)
        try:
            lora = _request(name, request.lora_path, adapters.base_model, known)
            adapters.check_path(request.lora_path)
            await adapters.engine.add_lora(lora)
            adapters.register(lora)
        except ValueError as error:
            raise bad_request(str(error), "lora_path") from None
        finally:
            self._loading.remove(name)
        await self._peers.set_adapter(name, lora)
        if known is not None:
            with suppress(ValueError):  # in use: its requests end with it
                await adapters.engine.remove_lora(known.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, http: Request) -> Response:
        request, _ = await self._bodies.read(http.scope, http.receive, UnloadRequest)
        self._check_enabled()
        known = self._adapters.get(request.lora_name)
        if known is None:
            raise ApiError(404, f"there is no adapter {shown(request.lora_name)}", param="lora_name", code="not_found")
        try:
            await self._adapters.engine.remove_lora(known.lora_int_id)
        except ValueError as error:
            raise bad_request(str(error), "lora_name", "in_use") from None
        self._adapters.forget(request.lora_name)
        await self._peers.set_adapter(request.lora_name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    def _check_enabled(self) -> None:
        if not self._adapters.enabled:
            raise bad_request("the engine was started without room for adapters (--enable-lora)")
