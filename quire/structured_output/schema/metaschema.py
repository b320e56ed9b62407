"""Validates JSON schemas against the metaschema: libraries ignore an invalid value of a keyword without effect.

Annotations (title, default, ...) may have any value, and unknown keywords are left to the backends. Forms of older
drafts are accepted: a list of `items`, a boolean `exclusiveMinimum`.
"""

from collections.abc import Callable
from typing import Any

from quire.config.shown import shown

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) and value else [value]
    return all(isinstance(kind, str) and kind in TYPES for kind in kinds)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


Rule = tuple[Callable[[Any], bool], str]  # predicate, and its description

COUNT: Rule = (_is_count, "a whole number, 0 or more")
NUMBER: Rule = (_is_number, "a number")
TEXT: Rule = (lambda value: isinstance(value, str), "a text")
SCHEMA: Rule = (_is_schema, "a schema: an object, true or false")
SCHEMAS: Rule = (
    lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)),
    "a list of at least one schema",
)
NAMED_SCHEMAS: Rule = (
    lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
    "an object of schemas",
)
NAMED_LISTS: Rule = (
    lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
    "an object of lists of texts",
)
LIMIT: Rule = (lambda value: isinstance(value, bool) or _is_number(value), "a number")

KEYWORDS: dict[str, Rule] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of some"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "required": (_is_names, "a list of texts"),
    "items": (lambda value: _is_schema(value) or SCHEMAS[0](value) or value == [], "a schema or a list of some"),
    "dependentRequired": NAMED_LISTS,
    **dict.fromkeys(("minimum", "maximum"), NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), LIMIT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNT),
    **dict.fromkeys(("minContains", "maxContains"), COUNT),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef"), TEXT),
    **dict.fromkeys(("additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains"), SCHEMA),
    **dict.fromkeys(("propertyNames", "not", "if", "then", "else"), SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), NAMED_SCHEMAS),
}


def schema_fault(schema: Any) -> str | None:
    """The first invalid keyword value in the schema or its subschemas; None if it is valid."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"a schema is {shown(schema)}; it must be {SCHEMA[1].removeprefix('a schema: ')}"
    for name, value in schema.items():
        if name not in KEYWORDS:
            continue
        allows, words = KEYWORDS[name]
        if not allows(value):
            return f"{name} is {shown(value)}; it must be {words}"
        for part in _subschemas(name, value):
            if fault := schema_fault(part):
                return fault
    return None


def tag_fault(part: Any) -> str | None:
    """The same for the schemas in a structural tag."""
    if isinstance(part, dict) and part.get("type") == "json_schema" and "json_schema" in part:
        return schema_fault(part["json_schema"])
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return next((fault for each in parts if (fault := tag_fault(each))), None)


def _subschemas(name: str, value: Any) -> list[Any]:
    rule = KEYWORDS[name]
    if rule is NAMED_SCHEMAS:
        return list(value.values())
    if rule is SCHEMAS or (name == "items" and isinstance(value, list)):
        return list(value)
    return [value] if rule is SCHEMA or name == "items" else []
