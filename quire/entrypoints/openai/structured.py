"""The structured-output fields: OpenAI's response_format, vLLM's structured_outputs and guided_*."""

from typing import Any

from quire.config.shown import shown
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.protocol import GenerationRequest
from quire.messages.structured import FIELDS, StructuredOutputsParams, as_structured

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The request's structured-output parameters, after the cheap checks."""
    given = [name for name in FIELDS if getattr(request, name, None) is not None and name != "tool_choice"]
    if (request.response_format or {}).get("type") == "text":
        given.remove("response_format")
    if not given:
        return None
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} each constrain the response; send only one of them", given[-1])
    name = given[0]
    try:
        return _build(name, getattr(request, name), request)
    except ValueError as error:
        raise refused_value(error, FIELDS, name) from None


def _build(name: str, value: Any, request: GenerationRequest) -> StructuredOutputsParams | None:
    if name == "structured_outputs":
        return as_structured(value)
    options: dict[str, Any] = {"field": name}
    if request.guided_decoding_backend is not None:
        options["backend"] = request.guided_decoding_backend
    if request.guided_whitespace_pattern is not None:
        options["whitespace_pattern"] = request.guided_whitespace_pattern
    kind, wanted = (GUIDED[name], value) if name in GUIDED else _response_format(value)
    return StructuredOutputsParams(**{kind: wanted}, **options)


def _response_format(value: dict[str, Any]) -> tuple[str, Any]:
    match value.get("type"):
        case "json_object":
            return "json_object", True
        case "json_schema":
            holder = value.get("json_schema")
            # OpenAI's field is `schema`; vLLM's own class calls it `json_schema`.
            schema = holder.get("schema", holder.get("json_schema")) if isinstance(holder, dict) else None
            if schema is None:
                raise ValueError("response_format: json_schema.schema is required with type json_schema")
            return "json", schema
        case "structural_tag":
            return "structural_tag", _structural_tag(value)
        case other:
            raise ValueError(f"response_format: type is {shown(other)}; allowed: {', '.join(FORMATS)}")


def _structural_tag(value: dict[str, Any]) -> dict[str, Any]:
    """The current schema, with `format`, or the legacy one of `structures` and `triggers`."""
    if "format" in value:
        return {"type": "structural_tag", "format": value["format"]}
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(s, dict) for s in structures):
        raise ValueError("response_format: a structural_tag needs format, or structures and triggers")
    tags = [
        {
            "begin": tag.get("begin"),
            "content": {"type": "json_schema", "json_schema": tag.get("schema", {})},
            "end": tag.get("end"),
        }
        for tag in structures
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
