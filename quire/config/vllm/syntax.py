"""vLLM's ways to write a command line, as the words that argparse takes: underscores, short forms, dotted keys of an
object, `-O3`, and a YAML file of flags."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config.fields import flag
from quire.config.vllm.table import OTHER_NAMES, SHORT

SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
KEYS = (flag("api_key"), flag("api_key_file"))
BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def human_integer(text: str) -> int:
    """A whole number, or one with a unit: `8k` is 8000, `8K` is 8192, `1.5M` is 1572864."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        return int(text)
    return int(float(found[1]) * (DECIMAL | BINARY)[found[2]])


def normalized(
    words: Sequence[str], is_flag: Callable[[str], bool], given: Mapping[str, Mapping[str, Any]] | None = None
) -> list[str]:
    """The words with every flag in its long form, and dotted keys gathered into JSON. `is_flag` knows the parser's;
    dotted keys change the object of the same flag, or else the one in `given`."""
    plain: list[str] = []
    dotted: dict[str, list[tuple[list[str], str]]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            rest.insert(0, word)
            break
        name, equals, value = word.partition("=")
        if name.startswith("--help"):
            plain.append("--help")  # vLLM's --help=GROUP
        elif re.fullmatch(r"-O\d?", name) and not is_flag(name):
            level = name[2:] or value or (rest.pop(0) if rest else "")
            plain += ["--optimization-level", level]
        elif name.startswith("-") and not re.match(r"-[\d.]", name):
            long, *keys = _long(name, is_flag).split(".")
            if keys and is_flag(long):
                if not equals and not rest:
                    raise ValueError(f"{word} needs a value")
                dotted.setdefault(long, []).append((keys, value if equals else rest.pop(0)))
            else:
                plain.append(".".join([long, *keys]) + equals + value)
        else:
            plain.append(word)
    for name, pairs in dotted.items():
        target = _taken_out(plain, name, (given or {}).get(name, {}))
        for keys, text in pairs:
            _set(target, keys, text, name)
        plain += [name, json.dumps(target)]
    return plain + rest


def _taken_out(plain: list[str], name: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """The last object that `plain` has for a flag, which is removed from it; otherwise a copy of `before`."""
    text = json.dumps(before)
    places = [at for at, word in enumerate(plain) if word.partition("=")[0] == name]
    if places:
        _, equals, text = plain.pop(places[-1]).partition("=")
        if not equals and places[-1] == len(plain):
            raise ValueError(f"{name} needs a value")
        text = text if equals else plain.pop(places[-1])
    found = _value(text)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {text!r}; with keys such as {name}.KEY it must be a JSON object")
    return found


def _long(name: str, is_flag: Callable[[str], bool]) -> str:
    head, dot, keys = name.partition(".")
    if head in SHORT and not is_flag(head) and is_flag(flag(SHORT[head])):
        return flag(SHORT[head]) + dot + keys
    if not head.startswith("--"):
        return name
    head = head.replace("_", "-")
    known = OTHER_NAMES.get(head[2:].replace("-", "_"))
    return (flag(known) if known else head) + dot + keys


def _set(target: dict[str, Any], keys: list[str], text: str, name: str) -> None:
    *path, last = keys
    for key in path:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ValueError(f"{name}.{'.'.join(keys)}: {key} is {target!r}, which has no keys")
    if last.endswith("+"):
        values = target.setdefault(last[:-1], [])
        if not isinstance(values, list):
            raise ValueError(f"{name}.{'.'.join(keys)}: {last[:-1]} is {values!r}, which is no list")
        values.extend(_value(each) for each in text.split(","))
    else:
        target[last] = _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return human_integer(text) if SIZE.fullmatch(text) else text


def read_config_file(name: str, how_many: Callable[[str], str]) -> list[str]:
    """The words that a YAML file of flags stands for. `how_many` values the parser takes after a flag: "one", "several"
    (the flag may be repeated) or "many" (also after one flag)."""
    import yaml  # type: ignore[import-untyped]

    file = Path(name).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{name} must be a .yaml or .yml file (--config)")
    try:
        given = yaml.safe_load(file.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {error} (--config)") from None
    if not isinstance(given, dict):
        raise ValueError(f"{name} must map flags to values, such as `port: 8000` (--config)")
    words: list[str] = []
    for key, value in given.items():
        option = flag(str(key))
        if option in KEYS and value in (None, []):
            raise ValueError(f"{name}: {key} is empty, and the server would be open; give a key, or remove the line")
        if "." in option:
            words += [option, value if isinstance(value, str) else json.dumps(value)]
        elif isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        elif isinstance(value, list) and (many := how_many(option)) != "one":
            if None in value:
                raise ValueError(f"{name}: {key} has an empty entry; give it a value, or remove it (--config)")
            texts = [_text(each) for each in value]
            words += [option, *texts] if many == "many" and texts else [word for t in texts for word in (option, t)]
        elif value is not None and value != []:
            words += [option, _text(value)]
    return words


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
