"""What Envoy does on an ext_proc call, and a service on a free loopback port to do it to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import grpc

from sidecar.control_headers import ControlHeaders
from sidecar.extproc.admission import AdmissionRules
from sidecar.extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from sidecar.extproc.protocol import BodyMode, RequestHeaders
from sidecar.extproc.rules import ServiceRules
from sidecar.extproc.server import Server
from sidecar.extproc.service import SERVICE_NAME, ExternalProcessor
from sidecar.http import RequestHead
from sidecar.limits import InFlightBudget
from sidecar.pipeline.request import DecodeRewrite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from sidecar.observability.record import AccessRecord
    from sidecar.pipeline.parity import PromptTokenParity
    from sidecar.pipeline.request import InboundRequest, PipelineResult

    Call = grpc.aio.StreamStreamCall[ProcessingRequest, ProcessingResponse]

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
CHAT = "/v1/chat/completions"
CONTROL = ControlHeaders(["x-tenant-secret"])
ADMISSION = AdmissionRules(
    max_body=1 << 20, phase_token="s3cret", control_headers=CONTROL, clear_route_cache=True
)
RULES = ServiceRules(
    admission=ADMISSION,
    read_timeout=30.0,
    request_deadline=60.0,
    metadata_namespace="epd.sidecar",
    expose_upstream=False,
)


def head_event(
    *fields: tuple[str, str],
    method: str = "POST",
    path: str = CHAT,
    mode: BodyMode = DUPLEX,
    end: bool = False,
) -> RequestHeaders:
    return RequestHeaders(RequestHead(method, path, "", fields), end, mode)


def headers(
    *fields: tuple[str, str],
    method: str = "POST",
    path: str = CHAT,
    mode: BodyMode = DUPLEX,
    end: bool = False,
    observability: bool = False,
) -> ProcessingRequest:
    """The first message of a call."""
    message = ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map((":method", method), (":path", path), *fields)),
        observability_mode=observability,
    )
    message.request_headers.end_of_stream = end
    message.protocol_config.request_body_mode = mode.value  # type: ignore[assignment]  # the enum's number
    return message


def body(data: bytes, *, end: bool = False) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=end))


def trailers(*fields: tuple[str, str]) -> ProcessingRequest:
    return ProcessingRequest(request_trailers=HttpTrailers(trailers=header_map(*fields)))


def header_map(*fields: tuple[str, str]) -> HeaderMap:
    return HeaderMap(
        headers=[HeaderValue(key=name, raw_value=value.encode("latin-1")) for name, value in fields]
    )


def pieces(answers: Iterable[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    """The full-duplex body pieces among the replies: data, end of stream."""
    found = [
        answer.request_body.response.body_mutation.streamed_response
        for answer in answers
        if answer.HasField("request_body")
    ]
    return [(piece.body, piece.end_of_stream) for piece in found]


def record(answer: ProcessingResponse) -> dict[str, str]:
    """The access-log record on a reply."""
    fields = answer.dynamic_metadata.fields["epd.sidecar"].struct_value.fields
    assert all(value.WhichOneof("kind") == "string_value" for value in fields.values())
    return {name: value.string_value for name, value in fields.items()}


_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the stubs


async def reply(call: Call) -> ProcessingResponse:
    """The next reply, which has to come."""
    answer: Any = await call.read()
    assert answer is not _EOF
    return cast("ProcessingResponse", answer)


async def remaining(call: Call) -> list[ProcessingResponse]:
    """All further replies, until the service ends the call."""
    answers: list[ProcessingResponse] = []
    while (answer := await call.read()) is not _EOF:
        answers.append(cast("ProcessingResponse", answer))
    assert await call.code() == grpc.StatusCode.OK
    return answers


@dataclass
class Harness:
    """A running server, one client channel to it, and what the service reported."""

    server: Server
    address: str
    channel: grpc.aio.Channel
    budget: InFlightBudget
    answered: list[AccessRecord] = field(default_factory=list)

    def call(self) -> Call:
        method: Any = self.channel.stream_stream(
            f"/{SERVICE_NAME}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        call: Call = method()
        return call

    def raw_call(self, *metadata: tuple[str, str]) -> Any:
        """A call whose messages are octets."""
        method: Any = self.channel.stream_stream
        return method(f"/{SERVICE_NAME}/Process")(metadata=metadata)

    async def exchange(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        """Send the messages, keep the call open, and read until the service ends it."""
        call = self.call()
        for message in messages:
            await call.write(message)
        return await remaining(call)


async def settled(harness: Harness) -> None:
    """Wait until the process holds nothing for any request."""
    async with asyncio.timeout(5):
        while harness.budget.requests or harness.budget.bytes:  # noqa: ASYNC110  # a budget raises no events
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    run: Callable[[InboundRequest], Awaitable[PipelineResult]],
    rules: ServiceRules = RULES,
    budget: InFlightBudget | None = None,
    parity: PromptTokenParity | None = None,
) -> AsyncIterator[Harness]:
    """The service on a free port."""
    budget = budget or InFlightBudget(100, 1 << 30)
    answered: list[AccessRecord] = []
    processor = ExternalProcessor(rules, run, budget, answered.append, parity)
    server = Server(processor, "127.0.0.1:0", drain_timeout=5.0, notice=0.0)
    address = await server.start()
    await server.ready(serving=True)
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    try:
        async with grpc.aio.insecure_channel(address, options=unlimited) as channel:
            yield Harness(server, address, channel, budget, answered)
    finally:
        await server.stop()


def with_admission(**changes: Any) -> ServiceRules:
    return replace(RULES, admission=replace(ADMISSION, **changes))


async def echo(request: InboundRequest) -> DecodeRewrite:
    """A pipeline that marks the request as decode and leaves its body."""
    request.record.model = "m"
    return DecodeRewrite((("EPP-Profile", "decode"),), ("x-gone",), [request.body])


async def hang(_request: InboundRequest) -> DecodeRewrite:
    await asyncio.Event().wait()
    raise AssertionError("waits for ever")
