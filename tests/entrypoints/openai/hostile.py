"""Structured-output constraints that are invalid, endless, ambiguous or far too large, and random ones."""

import random
from typing import Any


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chain(length: int, link: Any) -> dict[str, Any]:
    """A chain of definitions; `link` makes one from a reference to the next."""
    definitions = {f"n{i}": link({"$ref": f"#/$defs/n{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/n0", "$defs": definitions | {f"n{length}": {"type": "integer"}}}


def boxed(reference: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": reference}, "required": ["a"], "additionalProperties": False}


def either(reference: Any) -> dict[str, Any]:
    return {"anyOf": [reference, {"const": reference["$ref"]}]}


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def rules(count: int, rule: str) -> str:
    return "\n".join(rule.format(i=i, next=i + 1) for i in range(count))


OPTIONAL = " ".join(f"r{i}" for i in range(300))
# Kind, value, and the backend if not the engine's choice.
CASES: dict[str, tuple[Any, ...]] = {
    "nested 30 deep": ("json", nested(30)),
    "nested 200 deep": ("json", nested(200)),
    "an enum of 8000": ("json", {"enum": [f"value {i}" for i in range(8000)]}),
    "references in a circle": ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a reference to itself": ("json", {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "a reference to nothing": ("json", {"$ref": "#/$defs/none"}),
    "a reference to elsewhere": ("json", {"$ref": "http://127.0.0.1:9/schema"}),
    "references 2000 long": ("json", chain(2000, boxed), "guidance"),
    "references 4000 long": ("json", chain(4000, lambda to: {"type": "array", "items": to}), "guidance"),
    "a schema of 1 MB": ("json", {"type": "string", "description": "x" * (1 << 20)}),
    "2000 properties": ("json", wide(2000)),
    "a number that is none": ("json", {"type": "string", "maxLength": 10**30}),
    "a million items": ("json", {"type": "array", "minItems": 10**6, "items": {"type": "string"}}),
    "a product of choices": ("json", {"allOf": [{"anyOf": [{"const": j} for j in range(9)]} for _ in range(12)]}),
    "a long pattern": ("json", {"type": "string", "pattern": "|".join(f"w{i}" for i in range(3000))}),
    "catastrophic for others": ("regex", "(a+)+(a|a)*b"),
    "repeats of repeats": ("regex", "(a{1000}){1000}"),
    "optional repeats of repeats": ("regex", "((a{0,1000}){0,1000}){0,1000}"),
    "the same in a schema": ("json", {"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}"}),
    "parentheses": ("regex", "(" * 3000 + "a" + ")" * 3000),
    "a back reference": ("regex", r"(a)\1"),
    "nothing matches": ("regex", r"[^\s\S]"),
    "no end": ("grammar", 'root ::= "a" root'),
    "only itself": ("grammar", "root ::= root"),
    "left recursion": ("grammar", 'root ::= root "a" | "b"'),
    "nothing": ("grammar", 'root ::= ""'),
    "no grammar": ("grammar", "::= | ::="),
    "10000 alternatives": ("grammar", "root ::= " + " | ".join(f'"w{i} "' for i in range(10000))),
    "8000 rules": ("grammar", "start: r0\n" + rules(8000, 'r{i}: "a" r{next} | "b"') + '\nr8000: "c"', "guidance"),
    "ambiguous": ("grammar", 'root ::= e\ne ::= e e e | e e | [a-z ] | ""'),
    "all optional": ("grammar", f"root ::= {OPTIONAL}\n" + rules(300, "r{i} ::= [a-z]*"), "xgrammar"),
    "doubled 60 times": ("grammar", "root ::= r0\n" + rules(60, "r{i} ::= r{next} r{next}") + '\nr60 ::= "a"'),
    "5000 choices": ("choice", [f"w{i}" for i in range(5000)]),
    "a tag of many": (
        "structural_tag",
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "any_text"}] * 200}},
    ),
}
# Compiles for much longer than the limit.
SLOW = ("json", chain(800, either), "xgrammar")


def random_schema(draw: random.Random, depth: int = 3) -> Any:
    """Any nesting of keywords, valid or not."""
    inner = depth - 1
    kind = draw.choice(["string", "integer", "number", "boolean", "null", "enum"] + ["object", "array", "anyOf"] * 2)
    if depth <= 0 and kind in ("object", "array", "anyOf"):
        kind = "boolean"
    low = draw.randrange(-3, 4)
    match kind:
        case "string":
            more: Any = draw.choice(
                [{"maxLength": 5}, {"pattern": "^[a-c]{2,4}$"}, {"format": "date"}, {"minLength": 6, "maxLength": 2}]
            )
            return {"type": "string", **more}
        case "integer" | "number":
            return {"type": kind, "minimum": low, "maximum": low + draw.randrange(-1, 90)}
        case "enum":
            return {"enum": draw.sample(["é", '"', 1, None, True, {"a": 1}, [2], "x\ny"], 3)}
        case "object":
            names = draw.sample(["a", "b c", "é", '"q"', "$ref"], draw.randrange(0, 4))
            made: dict[str, Any] = {"type": "object", "properties": {n: random_schema(draw, inner) for n in names}}
            made["required"] = [name for name in names if draw.random() < 0.7]
            return made | draw.choice([{"additionalProperties": False}, {"additionalProperties": False}, {}])
        case "array":
            bounds = draw.choice([{"maxItems": 2}, {"minItems": 1, "maxItems": 3}, {"minItems": 3, "maxItems": 1}])
            return {"type": "array", "items": random_schema(draw, inner), **bounds}
        case "anyOf":
            return {draw.choice(["anyOf", "anyOf", "oneOf"]): [random_schema(draw, inner) for _ in range(2)]}
        case _:
            return {"type": kind}
