"""OpenAI's JSON as pydantic models, for requests of clients and of agents, and the errors for refused requests."""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from asyncrl.data.images import image_url
from asyncrl.data.rows import sent_image, without_marks
from asyncrl.errors import AsyncRLError

logger = logging.getLogger(__name__)

# Errors of refused requests, in OpenAI's error schema.


class ApiError(AsyncRLError):
    """A request fails with HTTP `status`; `param` names the field at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(name: str, found: str, do: str) -> ApiError:
    """400: the field `name` of the request cannot be served as it is."""
    return ApiError(400, f"{name}: {found}; {do}", param=name, code="invalid_value")


def unsupported(name: str, found: str = "this server does not support it") -> ApiError:
    return ApiError(400, f"{name}: {found}; leave the field out", param=name, code="unsupported_parameter")


HINTS = ("reasoning_effort", "verbosity", "store", "service_tier", "prompt_cache_retention")
"""Fields of requests that ask a provider for effort, price or storage: information here."""


_OF_PROVIDERS = (
    "web_search",
    "web_fetch",
    "code_",
    "file_search",
    "image_generation",
    "mcp",
    "namespace",
    "tool_search",
)
"""Beginnings of the types of tools that only a provider can run."""


def own_tools(form: type[BaseModel]) -> Any:
    """A validator for the tools of a request, of `form`. Tools that only a provider can run are left out."""

    def without_others(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kinds = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
        others = {kind for kind in kinds if kind.startswith(_OF_PROVIDERS)}
        if others:
            logger.warning("tools of type %s are left out: only their provider can run them", ", ".join(sorted(others)))
        return [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in others]

    named = {"type": {"type": "string", "pattern": f"^({'|'.join(_OF_PROVIDERS)})"}}
    other = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "required": ["type"], "properties": named})]
    return BeforeValidator(without_others, json_schema_input_type=list[form | other])


def own_choice(choice: Any) -> Any:
    """The choice of a tool that only a provider can run is none."""
    kind = str(choice.get("type")) if isinstance(choice, dict) else ""
    return None if kind.startswith(_OF_PROVIDERS) else choice


NOT_SERVED = "not_served"
"""Type of a validation error whose message names an unserved field."""

MAX_DEPTH = 64
"""Most levels of lists and objects in a request: serializers, templates and schema checks are recursive."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))

M = TypeVar("M", bound=BaseModel)


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError: it is not JSON, or has more than `MAX_DEPTH` levels."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") <= MAX_DEPTH or _depth(text) <= MAX_DEPTH:
            return value
    except RecursionError:
        pass  # too deep even to be parsed
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _depth(text: str) -> int:
    """Levels of lists and objects in a valid JSON text."""
    brackets = np.frombuffer(_STRING.sub("", text).encode().translate(None, _NO_BRACKET), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int((opens * np.int8(2) - np.int8(1)).cumsum(dtype=np.int32).max(initial=0))


def whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)
Length = Annotated[int, Field(ge=1), WHOLE]


class Fields(BaseModel):
    """Types as in JSON: true is not 1. A null field counts as left out."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, body: Any) -> Any:
        return {n: v for n, v in body.items() if v is not None} if isinstance(body, dict) else body


class Served(Fields):
    """A whole request. An unserved field is refused by name, unless its value has no effect.

    `harmless`: unserved fields with their values that have no effect. `information`: fields that are accepted and
    ignored, because they do not change the answer.
    """

    model_config = ConfigDict(extra="forbid")
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    information: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, body: Any) -> Any:
        """Drops fields without effect. Raises ApiError for other unserved fields."""
        known = {name: value for name, value in body.items() if name in cls.model_fields}
        for name, value in body.items():
            if name in known or name in cls.information or value is None:
                continue
            if name not in cls.harmless:
                raise unsupported(name)
            if not asks_for_nothing(value, cls.harmless[name]):
                raise unsupported(name, f"this server does not support {name}={short(value)}")
        return known


class TextPart(Fields):
    """One part of a multi-part content."""

    type: Literal["text"]
    text: str


class ImagePart(Fields):
    type: Literal["image_url"]
    image_url: dict[str, str]


SEND_TEXT = "send text, or images as data:image/png;base64,...: nothing is fetched, and audio is not supported"


def part_text(part: Any, kinds: Sequence[str]) -> str | None:
    """The text of a part of a content that is of these kinds, or its image as `Chat` takes it. None: it is neither."""
    if not isinstance(part, dict):
        return None
    if part.get("type") in kinds:
        return part["text"] if isinstance(part.get("text"), str) else None
    url = image_url(part)
    return None if url is None else sent_image(url)


def _joined(value: Any) -> Any:
    """Text with images as one string, or as OpenAI's list of parts."""
    parts = [part_text(part, ("text",)) for part in value] if isinstance(value, list) else [value]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise PydanticCustomError("no_text", SEND_TEXT)
    return without_marks("".join(texts))  # stored images are named by nobody


Text = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart | ImagePart])]


def parsed(model: type[M], body: object) -> M:
    """`body` as `model`. Raises ApiError naming the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(model, error) from None


def _refusal(model: type[BaseModel], error: ValidationError) -> ApiError:
    last = error.errors(include_url=False)[-1]  # among the forms of a value, the last is the most general
    where = _path(last["loc"])
    name = str(last["loc"][0])
    if last["type"] == NOT_SERVED:
        return unsupported(f"{where}.{last['msg']}")
    if last["type"] in ("extra_forbidden", "literal_error"):
        return unsupported(where)
    found = "it is missing" if last["type"] == "missing" else f"{short(last['input'])} cannot be served"
    examples = model.model_fields[name].examples if where == name and name in model.model_fields else None
    do = "send an object" if last["type"] == "model_type" else last["msg"].replace("Input", "it", 1)
    if examples or last["type"] == "missing":
        do = f"send {json.dumps(examples[0])}" if examples else "send it"
    return bad_field(name, found if where == name else f"{where}: {found}", do)


def _path(location: tuple[int | str, ...]) -> str:
    """A path such as messages[1].content, without pydantic's names for the forms of a value."""
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}"
        else:
            break
    return path


def asks_for_nothing(value: object, harmless: tuple[Any, ...]) -> bool:
    """Whether a value is one of `harmless`, compared as JSON: true is not 1."""
    return any(value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless)


def short(value: object) -> str:
    text = reprlib.repr(value)  # does not traverse large and deep values
    return text if len(text) <= 60 else text[:57] + "..."
