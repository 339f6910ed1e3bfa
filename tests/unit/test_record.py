from __future__ import annotations

from sidecar.observability.record import AccessRecord

CONTRACT = [
    "request_id",
    "api",
    "model",
    "stream",
    "outcome",
    "stage",
    "error",
    "media",
    "prompt_tokens",
    "placeholder_tokens",
    "mm_payload",
    "render_form",
    "encode_form",
    "encode_requests",
    "prefill_form",
    "fallback_reason",
    "media_ms",
    "render_ms",
    "encode_ms",
    "prefill_ms",
    "total_ms",
    "overhead_ms",
    "request_bytes",
    "render_bytes",
]
"""Keys of the access-log record; a new one goes to the end."""


def test_all_keys_are_always_present_in_order() -> None:
    """A record nobody has filled in has every key, "" for what did not happen."""
    strings = AccessRecord().strings()
    assert list(strings) == CONTRACT
    assert {key for key, value in strings.items() if value} == {"stage"}
    assert strings["stage"] == "request"


def test_every_value_is_a_string() -> None:
    """Numbers print as plain decimals, durations with one digit, booleans as JSON does."""
    record = AccessRecord(
        request_id="id",
        stream=False,
        outcome="ok",
        prompt_tokens=3_000_000,
        placeholder_tokens=0,
        encode_requests=2,
        encode_ms=1234567.89,
        prefill_ms=0.0,
        render_bytes=66_700_000,
    )
    strings = record.strings()
    assert all(type(value) is str for value in strings.values())
    assert strings["stream"] == "false"
    assert AccessRecord(stream=True).strings()["stream"] == "true"
    assert strings["prompt_tokens"] == "3000000"
    assert strings["placeholder_tokens"] == "0"
    assert strings["encode_ms"] == "1234567.9"
    assert strings["prefill_ms"] == "0.0"
    assert strings["render_bytes"] == "66700000"
    assert strings["media_ms"] == ""
