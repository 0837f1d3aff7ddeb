"""The OpenAPI description of the server, made from the tables and limits that requests are checked by. Pure.

What it cannot say: that a prompt and its answer fit the model's context, that min_tokens is at most max_tokens, and
which roles the chat template knows. Such requests get status 400, too.
"""

from __future__ import annotations

from typing import Any

from asyncrl.inference.shared.request_checks import MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE, MIN_TOP_P
from asyncrl.serving.protocol import (
    HARMLESS,
    INFORMATION,
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)

_ERRORS = {
    "400": "a field cannot be served, or the body is no JSON",
    "401": "the key is missing or wrong",
    "403": "the Host header names no address of this machine",
    "404": "no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not said to be JSON",
    "429": "too many requests are in flight",
    "500": "a defect of the server",
    "503": "no replica serves",
    "504": "the longest time of a request passed",
}
_READ_ONLY = ("401", "403", "500")


def schema(model: str, vocab_size: int, *, keyed: bool) -> dict[str, Any]:
    """Args:
    model: the name that it is served under.
    keyed: requests need a key.
    """
    token_ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    text = {"type": "string", "minLength": 1}
    prompts = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [text, token_ids]}}
    chat = {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "max_completion_tokens": _optional(_LENGTH),
        "logprobs": _BOOLEAN,
    }
    completion = {"prompt": {"anyOf": [text, token_ids, prompts]}, "logprobs": {"enum": [None, False, True, 0]}}
    generated = {"choices": {"type": "array", "items": {"type": "object"}}, "usage": {"type": "object"}}
    paths = {
        "/v1/chat/completions": _generate("chat", chat, "messages", model, generated),
        "/v1/completions": _generate("completion", completion, "prompt", model, generated),
        "/v1/models": _get("models", _object(data={"type": "array", "items": _MODEL})),
        "/v1/models/{id}": _get("model", _MODEL, "404"),
        "/openapi.json": _get("schema", {"type": "object"}),
        "/metrics": _get("metrics", {"type": "string"}, kind="text/plain"),
        "/health": _get("health", _object(serving=_COUNT, replicas=_COUNT), "503"),
    }
    paths["/v1/models/{id}"]["get"]["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    made: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": "asyncrl-serve", "version": "1"}, "paths": paths}
    if keyed:
        made |= {"security": [{"key": []}]}
        made |= {"components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}}
        paths["/health"]["get"]["security"] = []
    return made


def _generate(name: str, own: dict[str, Any], required: str, model: str, generated: dict[str, Any]) -> dict[str, Any]:
    shared = {
        "model": {"enum": [None, model]},
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "stream": {"type": "boolean"},
        "temperature": {
            "anyOf": [{"const": 0}, {"type": "number", "minimum": MIN_TEMPERATURE, "maximum": MAX_TEMPERATURE}]
        },
        "top_p": {"type": "number", "minimum": MIN_TOP_P, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": MAX_TOP_K},
        "max_tokens": _LENGTH,
        "min_tokens": _COUNT,
        "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}]},
        "stop_token_ids": {
            "type": "array",
            "maxItems": MAX_STOP_TOKENS,
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        },
        "seed": {"type": "integer"},
        **{name: {"type": "boolean"} for name in ("return_token_ids", "ignore_eos", "skip_special_tokens")},
    }
    fields: dict[str, Any] = {field: _optional(kind) for field, kind in shared.items()}
    fields |= {field: {"enum": [None, *values]} for field, values in HARMLESS.items()}
    fields |= {field: {} for field in INFORMATION} | own
    fields["stream_options"] = _optional(
        {
            "type": "object",
            "properties": {
                "include_usage": _BOOLEAN,
                "include_obfuscation": {"enum": [None, False]},
                "continuous_usage_stats": {"enum": [None, False]},
            },
            "additionalProperties": False,
        }
    )
    body = {
        **{"type": "object", "properties": fields, "required": [required], "additionalProperties": False},
        "if": {"required": ["stream_options"], "properties": {"stream_options": {"type": "object"}}},
        "then": {"required": ["stream"], "properties": {"stream": {"const": True}}},
    }
    content = {
        "application/json": {"schema": _object(**generated)},
        "text/event-stream": {"schema": _object(data=_TEXT)},  # each event
    }
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": {"description": "the answer", "content": content}} | _errors(*_ERRORS),
        }
    }


def _get(name: str, answer: dict[str, Any], *errors: str, kind: str = "application/json") -> dict[str, Any]:
    good = {"200": {"description": "the answer", "content": {kind: {"schema": answer}}}}
    return {"get": {"operationId": name, "responses": good | _errors(*_READ_ONLY, *errors)}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


def _optional(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, kind]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_BOOLEAN = {"enum": [None, False, True]}
_LENGTH = {"type": "integer", "minimum": 1}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_NOTHING = {"enum": [None, False, 0, "", [], {}]}
"""What a message may say of a field that is not served."""
_PART = _object(type={"const": "text"}, text=_TEXT)
_MESSAGE = {
    "type": "object",
    "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}},
    "required": ["role", "content"],
    "additionalProperties": _NOTHING,
}
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
)
