"""The errors that clients get for requests that are not served, in OpenAI's error schema."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import AsyncRLError


class ApiError(AsyncRLError):
    """A request ends with HTTP `status`; `param` names the field that is at fault, `code` is for programs."""

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
    """400: the field `name` of the request cannot be served as it stands."""
    return ApiError(400, f"{name}: {found}; {do}", param=name, code="invalid_value")


def unsupported(name: str, found: str = "this server does not support it") -> ApiError:
    return ApiError(400, f"{name}: {found}; leave the field out", param=name, code="unsupported_parameter")
