"""Which JSON schemas each backend enforces exactly.

XGrammar and outlines ignore unknown keywords. Here a schema is checked against the keywords that each is known to
enforce; anything else is refused, so that `auto` falls back to another backend and a user who chose one learns why.
"""

import json
from decimal import Decimal
from typing import Any

from quire.structured_output.schema.regexes import pattern_unsupported_by_xgrammar

ANNOTATIONS = {
    "$comment",
    "$defs",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "example",
    "examples",
    "readOnly",
    "strict",  # of OpenAI's functions, which many write into their schema
    "title",
    "writeOnly",
}
OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
REGULAR = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"}
REGULAR |= {"minItems", "maxItems", "minLength", "maxLength"}
XGRAMMAR_FORMATS = ("uuid", "ipv6")  # it enforces the others too loosely
MAX_MULTIPLE = 10_000  # of multipleOf without its decimal point; llguidance compiles 2**24 for minutes


def schema_unsupported_by_xgrammar(schema: Any) -> str | None:
    """The first part of the schema that XGrammar does not enforce exactly; None if there is none."""
    if isinstance(schema, bool):
        return None if schema else "the schema false is not supported"
    if not isinstance(schema, dict):
        return None  # the compiler will report the error
    used = schema.keys() - ANNOTATIONS
    for name in ("$defs", "definitions"):
        for part in _values(schema.get(name)):
            if reason := schema_unsupported_by_xgrammar(part):
                return reason
    if "$ref" in used:
        if not str(schema["$ref"]).startswith(("#/$defs/", "#/definitions/")) and schema["$ref"] != "#":
            return f"the reference {schema['$ref']!r} is not supported"
        return _alone("$ref", used)
    if "anyOf" in used:
        return _alone("anyOf", used) or _first(schema["anyOf"])
    if "enum" in used or "const" in used:
        return _alone("enum" if "enum" in used else "const", used - _fitting_type(schema))
    if "type" not in used and used and not (used <= OF_TYPE["object"] and "properties" in used):
        return f"{min(used)} without a type is not supported"
    kind = schema.get("type", "object" if used else None)
    kinds = kind if isinstance(kind, list) else [kind] if kind is not None else []
    unknown = used - {"type"} - set().union(*(OF_TYPE.get(str(k), set()) for k in kinds))
    if unknown:
        return f"{min(unknown)} is not supported"
    return _parts_unsupported_by_xgrammar(schema)


def _parts_unsupported_by_xgrammar(schema: dict[str, Any]) -> str | None:
    named = schema.get("properties")
    properties = named if isinstance(named, dict) else {}
    additional = schema.get("additionalProperties", False)
    if additional is not False and properties:
        return "additionalProperties beside properties is not supported"
    if any(not isinstance(name, str) or name not in properties for name in _values(schema.get("required"))):
        return "required names outside properties are not supported"
    if len(schema.keys() & {"pattern", "format"}) and schema.keys() & {"minLength", "maxLength"}:
        return "a pattern or format beside a length is not supported"
    if {"pattern", "format"} <= schema.keys():
        return "a pattern beside a format is not supported"
    if schema.get("format", "uuid") not in XGRAMMAR_FORMATS:
        return f"the format {schema['format']!r} is not supported"
    if "pattern" in schema and (reason := pattern_unsupported_by_xgrammar(str(schema["pattern"]))):
        return reason
    if "prefixItems" in schema and "items" in schema and schema["items"] is not False:
        return "items beside prefixItems is not supported"
    if "prefixItems" in schema and schema.keys() & {"minItems", "maxItems"}:
        return "a number of items beside prefixItems is not supported"
    parts = [*_values(properties), additional, schema.get("items", True), *_values(schema.get("prefixItems"))]
    return _first([part for part in parts if part is not False])


def unsupported_by_outlines(schema: Any) -> str | None:
    """outlines supports a subset of XGrammar's: what a simple regular expression can express."""
    if reason := schema_unsupported_by_xgrammar(schema):
        return reason
    return _not_regular(schema)


def _not_regular(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return "a schema without a type is not supported"
    if isinstance(schema.get("type"), list) or not schema.keys() & {"type", "enum", "const", "anyOf", "properties"}:
        return "a schema without one type is not supported"
    unknown = schema.keys() - ANNOTATIONS - REGULAR
    if unknown or (schema.get("type") == "object" and not schema.get("properties")):
        return f"{min(unknown)} is not supported" if unknown else "an object without properties is not supported"
    if schema.get("additionalProperties", False) is not False:
        return "additionalProperties is not supported"
    if schema.get("type") == "array" and "items" not in schema:
        return "an array without items is not supported"
    if any(json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in schema.get("properties") or ()):
        return "a property name that needs an escape is not supported"
    values = _values(schema["enum"]) if "enum" in schema else [schema["const"]] if "const" in schema else []
    if any(isinstance(value, (dict, list)) for value in values):
        return "an object or a list as a value is not supported"
    parts = [*_values(schema.get("properties")), *_values(schema.get("anyOf"))]
    parts += [schema["items"]] if "items" in schema else []
    return next((reason for part in parts if (reason := _not_regular(part))), None)


def unsupported_by_guidance(schema: Any) -> str | None:
    """llguidance rejects unknown keywords itself; these are the ones it interprets differently."""
    if isinstance(schema, dict):
        if "x-guidance" in schema:
            return "x-guidance is not allowed in a schema"
        if _digits(schema.get("multipleOf")) > MAX_MULTIPLE:
            return f"multipleOf {schema['multipleOf']} is not supported: more than {MAX_MULTIPLE} takes too long"
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if schema.get("minProperties", 0) not in (0, 1) and not closed:
            return "minProperties with open property names is not supported: a name could be repeated"
        return next((reason for part in schema.values() if (reason := unsupported_by_guidance(part))), None)
    if isinstance(schema, list):
        return next((reason for part in schema if (reason := unsupported_by_guidance(part))), None)
    return None


def _digits(number: Any) -> int:
    """A number without its sign and decimal point. Powers of ten cost nothing, so they count as 1."""
    if type(number) not in (int, float):
        return 0
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits))
    return 1 if digits.strip("0") == "1" else int(digits[:20])


def has_open_names(schema: Any) -> bool:
    """Whether an object declares some properties and allows additional ones."""
    if isinstance(schema, dict):
        named = schema.keys() & {"properties", "patternProperties"}
        if named and schema.get("additionalProperties") is not False:
            return True
        return any(map(has_open_names, schema.values()))
    return isinstance(schema, list) and any(map(has_open_names, schema))


def closed_objects(schema: Any) -> Any:
    """The schema with additionalProperties false in objects that declare properties."""
    if isinstance(schema, list):
        return [closed_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: part if name in ("enum", "const") else closed_objects(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and ("type" in schema or "required" in schema):
        closed.setdefault("additionalProperties", False)
    return closed


def _alone(name: str, used: set[str]) -> str | None:
    beside = used - {name}
    return f"{min(beside)} beside {name} is not supported" if beside else None


def _first(schemas: Any) -> str | None:
    return next((reason for part in _values(schemas) if (reason := schema_unsupported_by_xgrammar(part))), None)


def _values(part: Any) -> list[Any]:
    return list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else []


def _fitting_type(schema: dict[str, Any]) -> set[str]:
    """`type` is redundant beside enum or const if all values have that type."""
    types: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
        "array": (list,),
        "object": (dict,),
    }
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kinds = types.get(str(schema.get("type")), ())
    fits = all(isinstance(v, kinds) and (isinstance(v, bool) == (bool in kinds)) for v in _values(values))
    return {"type"} if kinds and fits else set()
