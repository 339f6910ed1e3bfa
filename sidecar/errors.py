"""Every way a request can fail, as one exception tree.

    SidecarError
    ├── BadRequest               400  epd_bad_request
    ├── BodyTooLarge             413  epd_body_too_large
    ├── UnsupportedEncoding      415  epd_unsupported_encoding
    ├── BodyTimeout              408  epd_body_timeout
    ├── MixedSpan                422  epd_mixed_span
    ├── StepRejected             4xx  epd_<step>_rejected
    ├── StepFailed               502  epd_<step>_failed
    ├── StepTimeout              504  epd_<step>_timeout
    ├── RenderUnavailable        502  epd_render_unavailable
    ├── EncodeMismatch           502  epd_encode_mismatch
    ├── DeadlineExceeded         504  epd_deadline
    ├── Overloaded               503  epd_overloaded
    ├── LoopDetected             508  epd_loop
    ├── UnsupportedBodyMode      500  epd_unsupported_body_mode
    └── InternalError            500  epd_internal

An error carries what the client may read (`message`), what only the log may hold (`detail`), and how the
access log files it (`code`, `outcome`). The API module of the request turns it into the client's JSON shape.
"""

from __future__ import annotations

from typing import Literal

Outcome = Literal[
    "ok",
    "passthrough",
    "served",
    "client_error",
    "upstream_error",
    "timeout",
    "overloaded",
    "internal_error",
]

StepName = Literal["media", "render", "conditional_decode", "encode", "prefill", "prefill_decode", "decode"]
Stage = Literal[
    "request", "media", "render", "conditional_decode", "encode", "prefill", "prefill_decode", "decode"
]


class SidecarError(Exception):
    """Base of all request failures.

    Attributes:
        status: HTTP status the client gets.
        code: `error` key of the access-log record and RESPONSE_CODE_DETAILS.
        outcome: `outcome` key of the access-log record.
        message: client-safe text; says what to do.
        detail: text for the log only (bounded, redacted by whoever fills it).
        upstream_body: bounded excerpt of the upstream's answer; reaches the client only on request.
        stage: step that failed when the error knows better than the runner, else None.
        retry_after: seconds for a `retry-after` header, or None.
    """

    status: int = 500
    code: str = "epd_internal"
    outcome: Outcome = "internal_error"
    retry_after: int | None = None

    def __init__(
        self, message: str, *, detail: str = "", upstream_body: str = "", stage: Stage | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.upstream_body = upstream_body
        self.stage = stage


class BadRequest(SidecarError):
    """The client's request is malformed or asks for what is not allowed."""

    status = 400
    code = "epd_bad_request"
    outcome = "client_error"

    def __init__(self, message: str, *, param: str | None = None, stage: Stage | None = None) -> None:
        super().__init__(message, stage=stage)
        self.param = param


class BodyTooLarge(SidecarError):
    """The body exceeds `ext_proc.max_request_body_size`."""

    status = 413
    code = "epd_body_too_large"
    outcome = "client_error"


class UnsupportedEncoding(SidecarError):
    """The body carries a content-encoding other than identity."""

    status = 415
    code = "epd_unsupported_encoding"
    outcome = "client_error"


class BodyTimeout(SidecarError):
    """The upload did not finish within `ext_proc.read_timeout`."""

    status = 408
    code = "epd_body_timeout"
    outcome = "timeout"


class MixedSpan(SidecarError):
    """A placeholder span mixes tokens, so the media cannot travel without its tensors."""

    status = 422
    code = "epd_mixed_span"
    outcome = "client_error"


class _StepError(SidecarError):
    """A failure of one named step; the step is the stage."""

    def __init__(self, step: StepName, message: str, *, detail: str = "", upstream_body: str = "") -> None:
        super().__init__(message, detail=detail, upstream_body=upstream_body, stage=step)
        self.step = step


class StepRejected(_StepError):
    """An upstream answered 4xx: the client gets the same status."""

    outcome = "client_error"

    def __init__(
        self, step: StepName, status: int, message: str, *, detail: str = "", upstream_body: str = ""
    ) -> None:
        super().__init__(step, message, detail=detail, upstream_body=upstream_body)
        self.status = status
        self.code = f"epd_{step}_rejected"


class StepFailed(_StepError):
    """An upstream answered 5xx, could not be reached, or answered something inconsistent."""

    status = 502
    outcome = "upstream_error"

    def __init__(self, step: StepName, message: str, *, detail: str = "", upstream_body: str = "") -> None:
        super().__init__(step, message, detail=detail, upstream_body=upstream_body)
        self.code = f"epd_{step}_failed"


class StepTimeout(_StepError):
    """A step did not finish within its own timeout."""

    status = 504
    outcome = "timeout"

    def __init__(self, step: StepName, message: str) -> None:
        super().__init__(step, message)
        self.code = f"epd_{step}_timeout"


class RenderUnavailable(SidecarError):
    """The render service is not deployed the way this sidecar needs it."""

    status = 502
    code = "epd_render_unavailable"
    outcome = "upstream_error"


class EncodeMismatch(SidecarError):
    """Render and encode disagree on the size of an image: a prefill would crash its engine."""

    status = 502
    code = "epd_encode_mismatch"
    outcome = "upstream_error"


class DeadlineExceeded(SidecarError):
    """`ext_proc.request_deadline` passed before the decode request was ready."""

    status = 504
    code = "epd_deadline"
    outcome = "timeout"


class Overloaded(SidecarError):
    """`limits.max_in_flight_requests` or `limits.max_in_flight_bytes` is exhausted."""

    status = 503
    code = "epd_overloaded"
    outcome = "overloaded"
    retry_after = 1


class LoopDetected(SidecarError):
    """A sub-request of a sidecar came back to the filter: the gateway address is wired to this route."""

    status = 508
    code = "epd_loop"
    outcome = "internal_error"


class UnsupportedBodyMode(SidecarError):
    """The filter is configured with a request body mode that cannot carry a rewrite."""

    status = 500
    code = "epd_unsupported_body_mode"
    outcome = "internal_error"


class InternalError(SidecarError):
    """A fault of the sidecar itself; the client learns no detail."""

    status = 500
    code = "epd_internal"
    outcome = "internal_error"
