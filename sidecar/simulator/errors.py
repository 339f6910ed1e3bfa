"""Failures of a simulated vLLM, in vLLM's own error shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_VALIDATION = "Bad Request"


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: text of `error.message`.
        kind: `error.type`, the class name vLLM puts there.
        param: dotted path of the offending field, or None.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def document(self, *, anthropic: bool = False) -> dict[str, Any]:
        """The JSON body of the answer; Anthropic's shape only for what the handler of its API raises."""
        if anthropic and self.kind != _VALIDATION:
            return {"type": "error", "error": {"type": self.kind, "message": self.message}}
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        }


class NotServed(Exception):
    """The role has no such endpoint: FastAPI's own 404, which knows no `error` object."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400 as request handlers raise it."""
    return ApiError(400, message, kind="BadRequestError", param=param)


def invalid_field(name: str, problem: str) -> ApiError:
    """A 400 as body validation raises it; `name` is the dotted path below the body."""
    return _invalid(f"body.{name}", problem)


def invalid_body(problem: str) -> ApiError:
    """A 400 as body validation raises it for members that contradict each other, or for no object."""
    return _invalid("body", problem)


def unsupported_state(name: str) -> ApiError:
    """The 400 for a member that refers to a stored response."""
    return ApiError(400, f"{name} is not supported by this server.", kind="invalid_request_error", param=name)


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    """The 404 for a model this server does not serve."""
    return ApiError(
        404,
        f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}.",
        kind="NotFoundError",
        param="model",
    )


def scale_out_disabled() -> ApiError:
    """The 403 of a server started without `--enable-scale-out`."""
    return ApiError(
        403,
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        kind="PermissionDeniedError",
    )


def internal_error(message: str = "Internal server error") -> ApiError:
    """A 500 the engine survives."""
    return ApiError(500, message, kind="InternalServerError")


def _invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"1 validation error: {param}: {problem}", kind=_VALIDATION, param=param)
