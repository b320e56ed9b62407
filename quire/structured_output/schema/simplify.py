"""Rewrites a schema into keywords that libraries support, where these mean the same.

Whatever is valid under the result is valid under the schema. The converse holds too, except for numbers under `not`,
leap seconds and the year 0000. A result that still has `unevaluated...` is refused by every library.
"""

from collections.abc import Callable
from typing import Any

from quire.structured_output.schema.formats import PATTERNS

Schema = dict[str, Any]

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    *("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "propertyNames"),
    *("not", "if", "then", "else"),
)
COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
# Keywords whose subschemas apply to the same instance, so that properties evaluated there count as evaluated here.
IN_PLACE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas"}
TYPES = ("object", "array", "string", "number", "boolean", "null")
MAX_REFERENCES = 8  # in a chain
MAX_DEPENDENT = 4  # each may double the size of the grammar


def simplify(schema: Any, root: Any = None) -> Any:
    """`root`: the schema that references are relative to."""
    if not isinstance(schema, dict):
        return schema
    root = schema if root is None or "$id" in schema else root
    # Subschemas go last: rules about evaluated properties need them as given.
    found = dict(schema)
    for rule in RULES:
        rule(found, root)
    if found.get("not") is True:
        return False
    for name in found.keys() & set(MAPS):
        if isinstance(found[name], dict):
            found[name] = {key: simplify(part, root) for key, part in found[name].items()}
    for name in found.keys() & set(LISTS):
        if isinstance(found[name], list):
            found[name] = [simplify(part, root) for part in found[name]]
    for name in found.keys() & set(SINGLE):
        found[name] = simplify(found[name], root)
    return found


def simplify_tag(part: Any) -> Any:
    """A structural tag with simplify schemas in it."""
    if isinstance(part, list):
        return [simplify_tag(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":
        return part | {"json_schema": simplify(part.get("json_schema"))}
    return {name: simplify_tag(value) for name, value in part.items()}


def _whole_counts(schema: Schema, root: Any) -> None:
    for name in COUNTS:
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = int(value)


def _formats(schema: Schema, root: Any) -> None:
    if schema.get("format") in PATTERNS:
        pattern = PATTERNS[schema.pop("format")]
        if "pattern" in schema:
            _also(schema, {"pattern": pattern})
        else:
            schema["pattern"] = pattern


def _conditions(schema: Schema, root: Any) -> None:
    if isinstance(schema.get("if"), bool):
        met = "then" if schema["if"] else "else"
        if met in schema:
            _also(schema, schema[met])
        _drop(schema, "if", "then", "else")
    elif "if" not in schema or not schema.keys() & {"then", "else"}:
        _drop(schema, "if", "then", "else")


def _contains(schema: Schema, root: Any) -> None:
    if "contains" not in schema:
        _drop(schema, "minContains", "maxContains")
        return
    least = schema.get("minContains", 1)
    if schema["contains"] in (True, {}) and isinstance(least, int):
        schema["minItems"] = max(least, schema.get("minItems", 0))
        if "maxContains" in schema:
            schema["maxItems"] = min(schema["maxContains"], schema.get("maxItems", schema["maxContains"]))
        _drop(schema, "contains", "minContains", "maxContains")
    elif least == 0 and "maxContains" not in schema and "unevaluatedItems" not in schema:
        _drop(schema, "contains", "minContains")


def _unique(schema: Schema, root: Any) -> None:
    if schema.get("uniqueItems") is False or schema.get("maxItems", 2) in (0, 1):
        _drop(schema, "uniqueItems")


def _unevaluated_items(schema: Schema, root: Any) -> None:
    if "unevaluatedItems" not in schema:
        return
    if schema["unevaluatedItems"] in (True, {}) or "items" in schema:
        _drop(schema, "unevaluatedItems")
    elif not schema.keys() & (IN_PLACE | {"contains"}):
        schema["items"] = schema.pop("unevaluatedItems")


def _unevaluated_properties(schema: Schema, root: Any) -> None:
    if "unevaluatedProperties" not in schema:
        return
    if schema["unevaluatedProperties"] in (True, {}) or "additionalProperties" in schema:
        _drop(schema, "unevaluatedProperties")
        return
    names: Schema = {}
    patterns: Schema = {}
    if not _collect_evaluated(schema, root, names, patterns, MAX_REFERENCES):
        return
    for key, evaluated in (("properties", names), ("patternProperties", patterns)):
        if evaluated:
            schema[key] = evaluated | schema.get(key, {})
    schema["additionalProperties"] = schema.pop("unevaluatedProperties")


def _collect_evaluated(schema: Any, root: Any, names: Schema, patterns: Schema, depth: int) -> bool:
    """Collect property names that the schema evaluates for any instance. False if that depends on the instance."""
    if schema is True:
        return True
    if not isinstance(schema, dict) or depth == 0 or schema.keys() & (IN_PLACE - {"allOf", "$ref"}):
        return False
    if depth < MAX_REFERENCES and schema.keys() & {"additionalProperties", "unevaluatedProperties", "$id"}:
        return False
    names |= dict.fromkeys(schema.get("properties", ()), True)
    patterns |= dict.fromkeys(schema.get("patternProperties", ()), True)
    parts = [*schema.get("allOf", ())]
    if "$ref" in schema:
        parts.append(_resolve(schema["$ref"], root))
    return all(_collect_evaluated(part, root, names, patterns, depth - 1) for part in parts)


def _resolve(reference: Any, root: Any) -> Any:
    place, _, name = str(reference).rpartition("/")
    return root.get(place[2:], {}).get(name) if place in ("#/$defs", "#/definitions") else None


def _not(schema: Schema, root: Any) -> None:
    inner = schema.get("not")
    if inner == {}:
        schema["not"] = True
    elif inner is False:
        _drop(schema, "not")
    elif schema.keys() & {"unevaluatedItems", "unevaluatedProperties"}:
        return  # a subschema under `not` evaluates nothing
    elif isinstance(inner, dict) and inner.keys() == {"not"}:
        _drop(schema, "not")
        _also(schema, inner["not"])
    elif isinstance(inner, dict) and inner.keys() == {"type"}:
        others = set(_types(inner)) | ({"number"} if "integer" in _types(inner) else set())
        left = [t for t in _types(schema) or TYPES if t not in others and not (t == "integer" and "number" in others)]
        schema["not"] = not left
        if left:
            _drop(schema, "not")
            schema["type"] = left[0] if len(left) == 1 else left


def _one_of(schema: Schema, root: Any) -> None:
    if isinstance(schema.get("oneOf"), list):
        possible = [part for part in schema["oneOf"] if part is not False]
        if len(possible) == 1:
            _drop(schema, "oneOf")
            _also(schema, possible[0])


def _property_names(schema: Schema, root: Any) -> None:
    names = schema.get("propertyNames")
    if names is None or "patternProperties" in schema:
        return
    if names in (True, {}):
        _drop(schema, "propertyNames")
        return
    if names is False:
        names = {"enum": []}
    if not isinstance(names, dict):
        return
    names = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    others = schema.get("additionalProperties", True)
    given = schema.get("properties", {})
    if names.keys() in ({"enum"}, {"const"}):
        allowed = names["enum"] if "enum" in names else [names["const"]]
        schema["properties"] = {name: given.get(name, others) for name in allowed if isinstance(name, str)}
    elif not given and names.keys() == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: others}
    elif not given and names and names.keys() <= {"minLength", "maxLength"}:
        pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        schema["patternProperties"] = {pattern: others}
    else:
        return
    _drop(schema, "propertyNames")
    schema["additionalProperties"] = False


def _dependent(schema: Schema, root: Any) -> None:
    required, schemas = schema.get("dependentRequired", {}), schema.get("dependentSchemas", {})
    if not isinstance(required, dict) or not isinstance(schemas, dict) or len(required) + len(schemas) > MAX_DEPENDENT:
        return
    _drop(schema, "dependentRequired", "dependentSchemas")
    for name, others in required.items():
        if others:
            _also(schema, {"anyOf": [{"properties": {name: False}}, {"required": [name, *others]}]})
    for name, part in schemas.items():
        without: Schema = {"properties": {name: False}}
        if part is not True:
            _also(schema, without if part is False else {"anyOf": [without, {"required": [name], "allOf": [part]}]})


RULES: tuple[Callable[[Schema, Any], None], ...] = (
    _whole_counts,
    _formats,
    _unevaluated_items,
    _unevaluated_properties,
    _conditions,
    _contains,
    _unique,
    _not,
    _one_of,
    _property_names,
    _dependent,
)


def _also(schema: Schema, part: Any) -> None:
    schema["allOf"] = [*schema.get("allOf", ()), part]


def _drop(schema: Schema, *names: str) -> None:
    for name in names:
        schema.pop(name, None)


def _types(schema: Schema) -> list[str]:
    found = schema.get("type", [])
    return found if isinstance(found, list) else [found]
