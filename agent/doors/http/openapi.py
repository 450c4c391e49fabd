"""OpenAPI document of the HTTP door, made of its operations: what is checked and answered is what is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import TypeAdapter

from agent.doors.http.operations import ErrorDocument
from agent.doors.http.routes import JSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.doors.http.operations import Operation

ALWAYS = (400, 401, 403, 413, 421, 429, 503)  # what any call may be refused with
REASONS = {
    400: "a parameter or the body is wrong", 401: "a token is wanted", 403: "the role does not allow it",
    404: "not found", 409: "given for something else before", 413: "the body is too large",
    421: "not a name of this machine", 429: "too much is under way", 503: "not now",
}  # fmt: skip
SCHEMAS = "#/components/schemas/{model}"
Mode: TypeAlias = Literal["validation", "serialization"]


def document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    kinds = _kinds(operations)
    schemas, defined = TypeAdapter.json_schemas(
        [(number, mode, TypeAdapter(kind)) for number, (kind, mode) in enumerate(kinds)], ref_template=SCHEMAS
    )
    of_kind = {(id(kind), mode): schemas[number, mode] for number, (kind, mode) in enumerate(kinds)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, of_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "CoServe", "version": version, "summary": "A line's station, and texts"},
        "paths": paths,
        "components": {
            "schemas": defined.get("$defs", {}),
            "responses": {
                _refusal(operation, status): {
                    "description": words,
                    "content": {JSON: {"schema": of_kind[id(_error_of(operation)), "serialization"]}},
                }
                for operation in operations
                for status, words in REASONS.items()
            },
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "coserve"},
            },
        },
        "security": [{}, {"token": []}, {"session": []}],
    }  # fmt: skip


def _kinds(operations: Iterable[Operation]) -> list[tuple[Any, Mode]]:
    kinds: list[tuple[Any, Mode]] = []
    for operation in operations:
        kinds.append((_error_of(operation), "serialization"))
        if not isinstance(operation.answer, tuple):
            kinds.append((operation.answer, "serialization"))
        if operation.body is not None:
            kinds.append((operation.body, "validation"))
    return list({(id(kind), mode): (kind, mode) for kind, mode in kinds}.values())


def _described(operation: Operation, of_kind: dict[tuple[int, Mode], Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "description": f"Least role: {operation.least.name.lower()}.",
        "operationId": f"{operation.method.lower()} {operation.path}",
        "responses": {str(operation.status): {"description": "done", "content": _content(operation, of_kind)}},
    }
    if operation.empty is not None:
        described["responses"][str(operation.empty)] = {"description": "unchanged, or nothing to tell"}
    for status in sorted({*ALWAYS, *operation.failures}):
        described["responses"][str(status)] = {"$ref": f"#/components/responses/{_refusal(operation, status)}"}
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        schema = of_kind[id(operation.body), "validation"]
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _content(operation: Operation, of_kind: dict[tuple[int, Mode], Any]) -> dict[str, Any]:
    if isinstance(operation.answer, tuple):
        return {kind: {} for kind in operation.answer}
    return {JSON: {"schema": of_kind[id(operation.answer), "serialization"]}, **{kind: {} for kind in operation.media}}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    schema = operation.asked.model_json_schema()
    required = schema.get("required", ())
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in operation.path else "query",
            "required": name in required,
            "schema": _plain(about),
        }
        for name, about in schema.get("properties", {}).items()
    ]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema: it is left out where a body would be null."""
    kept = {key: value for key, value in schema.items() if key not in {"title", "anyOf"}}
    if kept.get("default", 0) is None:
        del kept["default"]
    (first, *_) = [each for each in schema.get("anyOf", ({},)) if each.get("type") != "null"]
    return {**first, **kept}


def _error_of(operation: Operation) -> Any:  # noqa: ANN401  # a type
    return ErrorDocument if operation.error is None else operation.error


def _refusal(operation: Operation, status: int) -> str:
    return f"{_error_of(operation).__name__}{status}"
