"""One sub-request of a step: sent under the stopwatch, its failures turned into the client's errors."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING

from sidecar.errors import StepFailed, StepRejected
from sidecar.jsontext import MalformedJson, read_document
from sidecar.upstream.client import Call

if TYPE_CHECKING:
    from sidecar.errors import StepName
    from sidecar.http import HeaderPairs
    from sidecar.jsontext import RawObject, Segments
    from sidecar.pipeline.request import InboundRequest
    from sidecar.upstream.client import Answer, Upstream


_SECONDS = re.compile("[0-9]{1,6}")


async def post(
    inbound: InboundRequest,
    upstream: Upstream,
    *,
    step: StepName,
    path: str,
    headers: HeaderPairs,
    body: Segments,
) -> Answer:
    """Send one sub-request of `step` and read its answer, whatever its status."""
    call = Call(step, path, headers, body, inbound.ticket.reserve)
    with inbound.stopwatch.waiting():
        return await upstream.post(call)


def refusal(step: StepName, answer: Answer, call: str = "") -> StepRejected | StepFailed:
    """The error an answer that is not 200 means for the client: the same 4xx, or 502.

    Args:
        step: whose call it was.
        answer: what the upstream said.
        call: which of the step's calls it was, where it makes different ones.
    """
    name = f"{step} ({call})" if call else step
    excerpt = answer.excerpt()
    detail = f"HTTP {answer.status}: {excerpt}"
    if HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        rejected = StepRejected(
            step,
            answer.status,
            f"{name} rejected the request: HTTP {answer.status}",
            detail=detail,
            upstream_body=excerpt,
        )
        wait = answer.headers.get("retry-after", "")
        if _SECONDS.fullmatch(wait):
            rejected.retry_after = int(wait)
        return rejected
    return StepFailed(step, f"{name} failed: HTTP {answer.status}", detail=detail, upstream_body=excerpt)


def answer_object(step: StepName, answer: Answer) -> RawObject:
    """The members of a 200 answer; raises what `refusal` says, or StepFailed when it is not a JSON object."""
    if answer.status != HTTPStatus.OK:
        raise refusal(step, answer)
    try:
        return read_document(answer.body)
    except MalformedJson as error:
        raise StepFailed(
            step, f"{step} answered with something that is not a JSON object", detail=str(error)
        ) from None
