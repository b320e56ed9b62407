"""docs/hardening.md has every limit of the server, and no flag that does not exist."""

import re
from pathlib import Path

from quire.config import EngineConfig
from quire.config.fields import flag, options
from quire.config.server import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "hardening.md").read_text("utf-8")
LIMITS = re.compile(r"max_|h11_max_|timeout_|.*_timeout$|rate_limit")


def test_every_limit_of_the_server_is_listed() -> None:
    missing = [flag(name) for name in options(ServerConfig) if LIMITS.match(name) and f"`{flag(name)}`" not in PAGE]
    assert not missing


def test_no_flag_is_made_up() -> None:
    groups = [field.type for field in EngineConfig.__dataclass_fields__.values() if isinstance(field.type, type)]
    known = {flag(name) for group in (ServerConfig, *groups) for name in options(group)}
    assert set(re.findall(r"--[a-z][a-z0-9-]*", PAGE)) <= known | {"--help"}
