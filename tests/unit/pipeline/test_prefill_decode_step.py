from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.errors import StepFailed, StepRejected, StepTimeout
from sidecar.pipeline.state import RequestState
from tests.unit.pipeline.pipeline_support import (
    FORWARDED,
    GRIDS,
    HASHES,
    PHASE_TOKEN,
    REQUEST_ID,
    Deployment,
    answer,
    descriptor,
    sent,
    two_images,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.pipeline.request import DecodeRewrite
    from sidecar.upstream.client import Answer, Call

STEPS = ("render", "encode", "prefill-decode")
WORKER = "10.0.0.7:8000"
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def is_reservation(call: Call) -> bool:
    return ("prefer", "reserve-endpoint") in call.headers


def reserved(call: Call, prefill: Answer | None = None, more: Mapping[str, str] | None = None) -> Answer:
    """The answers of a picker that reserves WORKER, and of that worker."""
    if is_reservation(call):
        return answer(b"", headers={"x-prefill-host-port": WORKER, **(more or {})})
    return prefill or answer({"choices": []})


def deployment(**settings: Any) -> Deployment:
    options: dict[str, Any] = {"openai": True, "steps": STEPS, "both": reserved}
    return Deployment(**options | settings)


def legs(deployment: Deployment) -> list[Call]:
    return [call for call in deployment.gateway.calls if call.step == "prefill_decode"]


async def finished(rewrite: DecodeRewrite) -> None:
    assert rewrite.alongside is not None
    await rewrite.alongside()


async def test_three_legs_one_room() -> None:
    """Reservation, pinned prefill and decode: two bodies name the reserved worker and the same room."""
    setup = deployment(phase_token=PHASE_TOKEN)
    rewrite = await setup.run(two_images(max_tokens=64, stream=True))
    (reservation,) = legs(setup)
    assert is_reservation(reservation)
    assert not set(BOOTSTRAP) & sent(reservation).keys()
    await finished(rewrite)
    _, prefill = legs(setup)
    assert ("x-prefill-pin", WORKER) in prefill.headers
    assert "prefer" not in dict(prefill.headers)
    decode = json.loads(b"".join(rewrite.body))
    place = {name: decode[name] for name in BOOTSTRAP}
    assert place["bootstrap_host"] == "10.0.0.7"
    assert place["bootstrap_port"] == 8998
    assert sent(prefill) == sent(reservation) | place
    assert sent(prefill)["max_tokens"] == 1
    assert (decode["max_tokens"], decode["stream"]) == (64, True)
    assert "kv_transfer_params" not in decode.keys() | sent(prefill).keys()
    for call, suffix in ((reservation, "-reserve"), (prefill, "-prefill")):
        assert ("x-request-id", REQUEST_ID + suffix) in call.headers
        assert ("epp-profile", "prefill") in call.headers
        assert ("x-epd-phase-token", PHASE_TOKEN) in call.headers
    assert ("x-request-id", REQUEST_ID) in rewrite.set_headers
    assert ("epp-profile", "decode") in rewrite.set_headers


async def test_further_samples_have_rooms_at_prefill_too() -> None:
    """SGLang opens one room per sample: prefill is asked for as many as decode."""
    setup = deployment()
    rewrite = await setup.run(two_images(n=3))
    await finished(rewrite)
    reservation, prefill = legs(setup)
    assert "n" not in sent(reservation)
    assert (sent(prefill)["n"], sent(prefill)["max_tokens"]) == (3, 1)


async def test_prefill_is_sent_once_over_a_connection_of_its_own() -> None:
    """A second prefill in the same room would meet nobody; the reservation may be repeated."""
    setup = deployment()
    await finished(await setup.run(two_images()))
    assert [call.alone for call in legs(setup)] == [False, True]


async def test_two_answers_to_one_reservation_name_no_worker() -> None:
    """Repeated header fields are as little one worker as a list in one field."""
    setup = deployment()
    setup.gateway.open_headers = (("x-prefill-host-port", WORKER), ("x-prefill-host-port", "10.0.0.8:8000"))
    with pytest.raises(StepFailed, match="names no worker"):
        await setup.run(two_images())


async def test_the_companion_does_not_keep_the_request_alive() -> None:
    """Nothing of a finished request waits for the garbage collector: bodies are large."""
    setup = deployment()
    rewrite = await setup.run(two_images())
    assert rewrite.alongside is not None
    prefill: Any = getattr(rewrite.alongside, "__self__")  # noqa: B009 - a bound method, whatever its declared type
    assert not any(isinstance(item, RequestState) for item in gc.get_referents(prefill))


async def test_two_requests_never_share_a_room() -> None:
    """The room belongs to one request."""
    rooms = [(await deployment().decode(two_images()))["bootstrap_room"] for _ in range(2)]
    assert rooms[0] != rooms[1]


async def test_what_a_client_says_about_workers_and_ranks_is_gone() -> None:
    """Forged bootstrap members and ranks reach no leg, nor do the headers that would pin or name a worker."""
    forged = dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"), 3) | {
        "bootstrap_host": "evil.test",
        "bootstrap_port": 1,
        "bootstrap_room": 5,
    }
    setup = deployment(
        headers=(
            ("prefer", "reserve-endpoint"),
            ("x-prefill-pin", "10.9.9.9:1"),
            ("x-prefill-host-port", "10.9.9.9:1"),
            ("x-data-parallel-rank", "3"),
        )
    )
    rewrite = await setup.run(two_images(**forged))
    await finished(rewrite)
    bodies = [sent(call) for call in (*setup.renderer.calls, *setup.gateway.calls)]
    bodies.append(json.loads(b"".join(rewrite.body)))
    for body in bodies:
        assert not any("rank" in name for name in body)
        assert body.get("bootstrap_host", "10.0.0.7") == "10.0.0.7"
    reservation, prefill = legs(setup)
    assert [value for name, value in reservation.headers if name == "prefer"] == ["reserve-endpoint"]
    assert [value for name, value in prefill.headers if name == "x-prefill-pin"] == [WORKER]
    for name in ("prefer", "x-prefill-pin", "x-prefill-host-port", "x-data-parallel-rank"):
        assert name in rewrite.remove_headers


async def test_the_generate_format_follows_the_decision_table() -> None:
    """Prefill has the form it has in the step of its own; the bootstrap members stand at the top level."""
    covered = {HASHES[0]: descriptor(GRIDS[0])}
    setup = deployment(openai=False, descriptors=covered)
    await finished(await setup.run(two_images()))
    _, prefill = legs(setup)
    assert prefill.path == "/inference/v1/generate"
    assert sent(prefill)["features"]["kwargs_data"]
    assert sent(prefill)["bootstrap_host"] == "10.0.0.7"
    assert sent(prefill)["ec_transfer_params"] == covered
    assert setup.record.prefill_form == "kwargs_data"


async def test_response_headers_of_the_reservation_travel_on() -> None:
    """Configured response headers of the first call reach prefill and decode."""
    setup = deployment(both=lambda call: reserved(call, more={FORWARDED: "r7"}))
    rewrite = await setup.run(two_images())
    await finished(rewrite)
    assert (FORWARDED, "r7") in legs(setup)[1].headers
    assert (FORWARDED, "r7") in rewrite.set_headers


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            answer({"error": "no"}, 404),
            StepRejected,
            r"prefill_decode \(reservation\) rejected the request: HTTP 404",
        ),
        (answer({"error": "no"}, 503), StepFailed, r"prefill_decode \(reservation\) failed: HTTP 503"),
        (answer(b"", 204), StepFailed, r"prefill_decode \(reservation\) failed: HTTP 204"),
        (answer(b""), StepFailed, "configure the endpoint picker of prefill for `Prefer: reserve-endpoint`"),
        (
            answer(b"", headers={"x-prefill-host-port": "10.0.0.1:1,10.0.0.2:1"}),
            StepFailed,
            "names no worker in x-prefill-host-port",
        ),
    ],
)
async def test_a_reservation_without_a_worker_fails_the_request(
    given: Answer, error: type[Exception], text: str
) -> None:
    """Nothing is sent to any engine, and the message says what is missing."""
    setup = deployment(both=lambda _: given)
    with pytest.raises(error, match=text):
        await setup.run(two_images())
    assert len(legs(setup)) == 1


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [(400, StepRejected, "epd_prefill_decode_rejected"), (500, StepFailed, "epd_prefill_decode_failed")],
)
async def test_a_failed_prefill_fails_the_call_beside_decode(
    status: int, error: type[StepRejected | StepFailed], code: str
) -> None:
    """The rewrite is made all the same; its companion raises what the client may get."""
    setup = deployment(both=lambda call: reserved(call, answer({"error": "x"}, status)))
    rewrite = await setup.run(two_images())
    with pytest.raises(error) as caught:
        await finished(rewrite)
    assert caught.value.code == code
    assert "prefill_decode (prefill)" in caught.value.message
    assert setup.record.prefill_ms is not None


async def test_a_prefill_nobody_fetches_from_times_out() -> None:
    """Prefill waits for decode under the timeout of the step, not for ever."""

    async def never(call: Call) -> Answer:
        if not is_reservation(call):
            await asyncio.Event().wait()
        return reserved(call)

    setup = deployment(both=never, both_timeout=0.01)
    rewrite = await setup.run(two_images())
    with pytest.raises(StepTimeout, match=r"prefill took longer than 0.01 s \(timeout of the prefill-decode"):
        await finished(rewrite)
