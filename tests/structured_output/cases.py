"""Schemas, regular expressions and grammars of many kinds."""

from typing import Any

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
LIST: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "null"]},
    "max length": {"type": "string", "maxLength": 5},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
    "pattern anywhere": {"type": "string", "pattern": "ab"},
    "pattern with any character": {"type": "string", "pattern": "^a.{2}b$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]+$", "maxLength": 4},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integer range": {"type": "integer", "minimum": -3, "maximum": 120},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 11},
    "integer from": {"type": "integer", "minimum": 18},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 4},
    "const": {"const": "fixed"},
    "const object": {"const": {"a": [1, None]}},
    "enum": {"enum": ["red", "green", 3, None, True]},
    "typed enum": {"type": "string", "enum": ["a", "b c", 'q"uote']},
    "enum with another type": {"type": "string", "enum": ["a", 1]},
    "array": {"type": "array", "items": {"type": "boolean"}},
    "array of length": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "array at least": {"type": "array", "items": {"type": "null"}, "minItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    "object": POINT,
    "optional properties": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
    "nested": {"type": "object", "properties": {"p": POINT, "q": {"type": "array", "items": POINT}}, "required": ["p"]},
    "any object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "properties and others": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "integer"}, POINT]},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 50}]},
    "recursive": LIST,
    "definitions": {"definitions": {"c": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/definitions/c"}},
    "annotated": {"title": "T", "description": "d", "default": 1, "examples": [2], "type": "integer"},
    "unicode": {"type": "object", "properties": {"schlüssel": {"const": "wért"}}, "required": ["schlüssel"]},
    "anything in a list": {"type": "array", "items": {}, "maxItems": 2},
}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"enum": [1]}}, "end": "</f>"}],
}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "string"}},
    "unique": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "dependent": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "property names": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluated": {"type": "object", "unevaluatedProperties": False, "anyOf": [{"properties": {"a": True}}, {}]},
}
REGEXES = [
    "a",
    "abc|xy+",
    "[a-f0-9]{4}",
    r"\d{3}-\d{4}",
    r"[A-Z][a-z]*( [A-Z][a-z]*){0,3}",
    r"(\+49|0)[1-9][0-9]{5,9}",
    r"[^abc]{1,5}",
    ".{1,6}",
    r"a.c\.d",
    "^anchored$",
    "^either|or$",
    r"[\w-]{2}|\d+@[a-z]+\.(com|org)",
    r"(a|b)*c",
    r"(ab){2,3}",
    r"x{2,}y?",
    r"[\[\]{}()]{2}",
    r"\[\]\\",
    r"é+ü?",
    r"[α-ω]{2}",
    r"(?:no|capture)s?",
    r"a*?b",
    r"(?i)HeLLo",
    r"\s?\S{2}",
    r"\W\D",
    r"(a+)+b",
    r"((a|aa)+)+c",
    "[-+]?[0-9]+([.][0-9]+)?",
    r"\n\t",
]
EBNF = {
    'root ::= "yes" | "no"': r"yes|no",
    'root ::= [a-z]+ " " digits\ndigits ::= [0-9] [0-9]?': r"[a-z]+ [0-9]{1,2}",
    'root ::= "(" root ")" | "x"': None,
    'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"': None,
    'root ::= ("a" | "b"){2,3}': r"[ab]{2,3}",
}
LARK = {
    'start: "a" b+\nb: "b" | "c"': r"a[bc]+",
    'start: NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/': r"[0-9]{1,3}(,[0-9]{1,3})*",
}
