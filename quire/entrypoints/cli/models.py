"""`quire models`: the supported architectures, and how a given model would be served."""

import argparse
import dataclasses
import json
import textwrap
from typing import Any

from quire.config import EngineConfig
from quire.config.fields import options
from quire.config.flags import FlagParser, add_engine_flags, engine_kwargs
from quire.models.registry import BUILT_IN, ModelRegistry

# The engine options that decide how a model is served.
DECISIVE = ("model_impl", "trust_remote_code", "hf_overrides", "revision", "download_dir")
OTHERS = (
    "Other architectures run with transformers' code if it has them as causal language models and its attention can be "
    "replaced by ours (pip install 'quire[transformers]'). Plugins add more. See docs/models.md."
)
HEADINGS = {"architecture": "architecture", "family": "family", "kind": "kind", "gguf": "GGUF", "note": "notes"}


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire models",
        description="List the architectures that Quire implements itself; with MODEL, show how that model would be "
        "served. Only its configuration is read.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="HF folder, .gguf file or hub id")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    everything = [name for config in EngineConfig.parts().values() for name in options(config)]
    add_engine_flags(parser, leave_out=[name for name in everything if name not in DECISIVE])
    return parser


def run(args: argparse.Namespace) -> int:
    from quire.plugins import load_plugins

    load_plugins()
    if args.model is not None:
        return _explain(args)
    rows = built_in_rows()
    added = {name: ModelRegistry.origin(name) for name in ModelRegistry.registered()}
    if args.json:
        print(json.dumps({"built_in": rows, "registered": added, "others": OTHERS}, indent=2, ensure_ascii=False))
        return 0
    print(as_text([*rows, *({"architecture": name, "note": origin} for name, origin in added.items())]))
    print(f"\n{textwrap.fill(OTHERS, 110)}")
    return 0


def built_in_rows() -> list[dict[str, str]]:
    return [{name: value for name, value in dataclasses.asdict(one).items() if name in HEADINGS} for one in BUILT_IN]


def as_text(rows: list[dict[str, str]]) -> str:
    table = [HEADINGS, *rows]
    widths = {name: max(len(row.get(name, "")) for row in table) for name in HEADINGS}
    return "\n".join("  ".join(row.get(name, "").ljust(widths[name]) for name in HEADINGS).rstrip() for row in table)


def _explain(args: argparse.Namespace) -> int:
    facts = how_served(args.model, engine_kwargs(args))
    if args.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        words = {"quire": "served", "transformers": "served through transformers", None: "not served"}
        print(f"{words[facts['impl']]}: {facts['why']}")
    return 0 if facts["impl"] else 1


def how_served(model: str, engine_args: dict[str, Any]) -> dict[str, Any]:
    from quire.engine.resolve_config import resolve_config
    from quire.models.implementation import choose_implementation

    # Dummy weights: no weight files are looked for or downloaded.
    config, checkpoint = resolve_config(
        EngineConfig.from_kwargs(**engine_args | {"model": model, "load_format": "dummy"})
    )
    wanted = config.model
    choice = choose_implementation(wanted.hf_config, wanted.model_impl, wanted.trust_remote_code, checkpoint.is_gguf)
    names = wanted.hf_config.get("architectures") or []
    return {"model": checkpoint.name, "architectures": names, "impl": choice.impl, "why": choice.reason}
