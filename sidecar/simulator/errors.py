"""Failures of a simulated vLLM, in vLLM's own error shape."""

from __future__ import annotations

from typing import Any


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

    def document(self) -> dict[str, Any]:
        """The JSON body of the answer."""
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
    return ApiError(
        400, f"1 validation error: body.{name}: {problem}", kind="Bad Request", param=f"body.{name}"
    )


def model_not_found(model: str) -> ApiError:
    """The 404 for a model this server does not serve."""
    return ApiError(404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model")


def scale_out_disabled() -> ApiError:
    """The 403 of a server started without `--enable-scale-out`."""
    return ApiError(
        403, "This endpoint requires the server flag --enable-scale-out.", kind="PermissionDeniedError"
    )


def internal_error(message: str = "Internal server error") -> ApiError:
    """A 500 the engine survives."""
    return ApiError(500, message, kind="InternalServerError")
