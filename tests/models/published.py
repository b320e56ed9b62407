"""Configs and tensor indexes of published checkpoints, as data: `{0-26}` in a name stands for each of these numbers."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def published_config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())["config"]


def published_tensors(name: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape."""
    patterns = json.loads((FOLDER / f"{name}.json").read_text())["tensors"]
    return {each: tuple(shape) for pattern, shape in patterns.items() for each in spelled_out(pattern)}


def spelled_out(pattern: str) -> list[str]:
    parts = re.split(r"\{(\d+)-(\d+)\}", pattern)
    numbers = [range(int(a), int(b) + 1) for a, b in zip(parts[1::3], parts[2::3], strict=True)]
    texts = parts[0::3]
    return [
        "".join(itertools.chain(*zip(texts, [*map(str, each), ""], strict=True)))
        for each in itertools.product(*numbers)
    ]


def cut_to(
    config: dict[str, Any], tensors: dict[str, tuple[int, ...]], layers: int, experts: int = 16
) -> tuple[Any, Any]:
    """The first layers, and the prediction layer behind the last, with fewer experts."""
    last = config["num_hidden_layers"]
    kept = {}
    for name, shape in tensors.items():
        number = re.match(r"model\.layers\.(\d+)\.", name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if (number and layers <= int(number[1]) < last) or (expert and int(expert[1]) >= experts):
            continue
        if number and int(number[1]) == last:
            name = name.replace(f"layers.{last}.", f"layers.{layers}.", 1)
        kept[name] = (experts, *shape[1:]) if ".mlp.gate." in name else shape
    changed = {"num_hidden_layers": layers} | ({"n_routed_experts": experts} if "n_routed_experts" in config else {})
    return config | changed, kept
