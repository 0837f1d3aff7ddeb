"""The OpenAPI description of the server, generated from the models that check requests. Pure.

Three rules are not expressible: a prompt and its answer must fit the model's context, min_tokens is at most max_tokens,
and the chat template knows only certain roles. Violations also get status 400.
"""

from __future__ import annotations

from typing import Any

from asyncrl.chat.anthropic import COUNT_TOKENS, MessagesRequest
from asyncrl.chat.fields import Served
from asyncrl.chat.responses import ResponsesRequest
from asyncrl.serving.protocol import ChatRequest, CompletionRequest

_ERRORS = {
    "400": "a field cannot be served, or the body is no JSON",
    "401": "the key is missing or wrong",
    "403": "the Host header names no address of this machine",
    "404": "no such model, or no such replica",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not said to be JSON",
    "429": "too many requests are in flight",
    "500": "a defect of the server",
    "503": "no replica serves, or none has a place in time",
    "504": "the longest time of a request passed",
}
_READ_ONLY = ("401", "403", "500")


def schema(model: str, vocab_size: int, *, keyed: bool) -> dict[str, Any]:
    """Args:
    model: the served name.
    keyed: requests need a key.
    """
    schemas: dict[str, Any] = {}
    completion = _body(CompletionRequest, model, schemas)
    _, ids, several = completion["properties"]["prompt"]["anyOf"]
    for items in ids["items"], several["items"]["anyOf"][1]["items"]:
        items["maximum"] = vocab_size - 1
    generated = {"choices": {"type": "array", "items": {"type": "object"}}, "usage": {"type": "object"}}
    count = _body(MessagesRequest, model, schemas)
    count["required"].remove("max_tokens")
    paths = {
        "/v1/chat/completions": _generate("chat", _body(ChatRequest, model, schemas), generated),
        "/v1/completions": _generate("completion", completion, generated),
        "/v1/responses": _generate("response", _body(ResponsesRequest, model, schemas), _TYPED),
        "/v1/messages": _generate("message", _body(MessagesRequest, model, schemas), _TYPED, _ANTHROPIC_ERROR),
        COUNT_TOKENS: _generate("count", count, {"input_tokens": _COUNT}, _ANTHROPIC_ERROR),
        "/v1/models": _get("models", _object(data={"type": "array", "items": _MODEL})),
        "/v1/models/{id}": _get("model", _MODEL, "404"),
        "/openapi.json": _get("schema", {"type": "object"}),
        "/metrics": _get("metrics", {"type": "string"}, kind="text/plain"),
        "/health": _get("health", _object(serving=_COUNT, replicas=_COUNT), "503"),
    }
    paths["/v1/models/{id}"]["get"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    components: dict[str, Any] = {"schemas": schemas}
    described = "Paths under /v1 and /health also exist below /replicas/ID, the address of one replica."
    info = {"title": "asyncrl-serve", "version": "1", "description": described}
    made: dict[str, Any] = {"openapi": "3.1.0", "info": info, "paths": paths}
    if keyed:
        made |= {"security": [{"key": []}]}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        paths["/health"]["get"]["security"] = []
    return made | {"components": components}


def _body(request: type[Served], model: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of a request's fields, including those without effect. Adds the referenced schemas to `schemas`."""
    made = request.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= made.pop("$defs", {})
    fields = made["properties"]
    fields["model"] = {"enum": [model]}
    made["properties"] = {name: kind if name in made["required"] else _optional(kind) for name, kind in fields.items()}
    unused = {field: {"enum": [None, *values]} for field, values in request.harmless.items()}
    made["properties"] = unused | {field: {} for field in request.information} | made["properties"]
    # Options of a stream are valid only for a streamed answer.
    if "stream_options" not in request.model_fields:
        return made
    return made | {
        "if": {"required": ["stream_options"], "properties": {"stream_options": {"type": "object"}}},
        "then": {"required": ["stream"], "properties": {"stream": {"const": True}}},
    }


def _generate(
    name: str, body: dict[str, Any], generated: dict[str, Any], error: dict[str, Any] | None = None
) -> dict[str, Any]:
    content = {
        "application/json": {"schema": _object(**generated)},
        "text/event-stream": {"schema": _object(data=_TEXT)},  # each event
    }
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": {"description": "the answer", "content": content}} | _errors(*_ERRORS, kind=error),
        }
    }


def _get(name: str, answer: dict[str, Any], *errors: str, kind: str = "application/json") -> dict[str, Any]:
    good = {"200": {"description": "the answer", "content": {kind: {"schema": answer}}}}
    return {"get": {"operationId": name, "responses": good | _errors(*_READ_ONLY, *errors)}}


def _errors(*statuses: str, kind: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": kind or _ERROR}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


def _optional(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, kind]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
)
_TYPED = {"id": _TEXT, "model": _TEXT, "usage": {"type": "object"}}
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
