"""JSON schemas of calls, for grammars."""

from collections.abc import Mapping, Sequence
from typing import Any

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    function = next(tool["function"] for tool in tools if tool["function"]["name"] == name)
    return _object(function)


def calls_schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """A list of {"name": ..., "parameters": ...}: one call or, if `parallel`, more."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        parameters = _object(function)
        moved = _with_refs_below(parameters, f"#/$defs/f{index}")
        if moved != parameters:  # its $refs are relative to its own root, which has moved
            definitions[f"f{index}"] = moved
            moved = {"$ref": f"#/$defs/f{index}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": moved},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _object(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or NO_PARAMETERS)
    return {"type": "object", **parameters}


def _with_refs_below(schema: Any, root: str) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _with_refs_below(value, root)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_with_refs_below(item, root) for item in schema]
    return schema
