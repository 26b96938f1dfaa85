"""What a client is told when something is wrong, in OpenAI's shape."""

from typing import Any

Headers = dict[str, str]


class ApiError(Exception):
    """A refusal or failure that a client is meant to read.

    Args:
        status: of HTTP.
        message: a sentence or two, without paths of this machine.
        param: the field of the request that is wrong.
        code: for programs.
        headers: to be sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI shapes it."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


_TYPES = {401: "authentication_error", 503: "overloaded_error", 504: "timeout_error"}

NOT_AGAIN = {"x-should-retry": "false"}
"""Tells OpenAI's clients that the same request would fail again."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that must be changed."""
    return ApiError(400, message, param, code)


def internal_error(request_id: str) -> ApiError:
    """A failure of the server, whose reason is in its log."""
    message = f"the server failed on this request; its log says why, under request id {request_id}"
    return ApiError(500, message, code="internal_error", headers=NOT_AGAIN)


def shutting_down() -> ApiError:
    """No more requests are taken."""
    message = "the server is shutting down; send the request to another one, or later"
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": "5"})


def out_of_time(seconds: float) -> ApiError:
    """An answer that took longer than a request may."""
    message = f"the answer took longer than {seconds:g} s, which is the limit of this server"
    return ApiError(504, message, code="request_timeout", headers=NOT_AGAIN)
