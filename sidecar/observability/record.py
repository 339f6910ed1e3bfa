"""The access-log record: one flat set of strings for every answer the sidecar gives.

The keys are a public contract of the access log: they are only ever added to, all of them are always present,
and every value is a string because numbers in Envoy's dynamic metadata print as doubles (`3e+06`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.errors import Outcome, Stage


@dataclass(slots=True)
class AccessRecord:
    """What happened to one request; steps fill it in as they run.

    Durations are milliseconds, sizes bytes; None means the thing did not happen and prints as "".
    """

    request_id: str = ""
    api: str = ""
    model: str = ""
    stream: bool | None = None
    outcome: Outcome | None = None
    stage: Stage = "request"
    error: str = ""
    media: str = ""
    prompt_tokens: int | None = None
    placeholder_tokens: int | None = None
    mm_payload: str = ""
    render_form: str = ""
    encode_form: str = ""
    encode_requests: int | None = None
    prefill_form: str = ""
    fallback_reason: str = ""
    media_ms: float | None = None
    render_ms: float | None = None
    encode_ms: float | None = None
    prefill_ms: float | None = None
    total_ms: float | None = None
    overhead_ms: float | None = None
    request_bytes: int | None = None
    render_bytes: int | None = None

    def strings(self) -> dict[str, str]:
        """All keys in contract order, each value as the access log prints it."""
        return {field.name: _text(getattr(self, field.name)) for field in fields(self)}


def _text(value: str | float | None) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.1f}"
        case _:
            return str(value)
