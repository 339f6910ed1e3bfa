"""One ext_proc call, pumped between Envoy and the pipeline, and accounted for.

A call is answered exactly once, whatever happens: Envoy forwards an empty body when a full-duplex call ends
without an answer, and writes the text of an exception that aborts a call into its access log.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar.api import api_for_path, default_error_body
from sidecar.errors import (
    BadRequest,
    BodyTimeout,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    SidecarError,
    UnsupportedBodyMode,
)
from sidecar.extproc import identity, replies
from sidecar.extproc.admission import Coordinate, PassThrough, decide
from sidecar.extproc.channel import Channel
from sidecar.extproc.exchange import CHUNK_SIZE, ClientLeft, CoordinatedExchange, PassthroughExchange
from sidecar.extproc.frames import release_frames
from sidecar.extproc.protocol import (
    BodyMode,
    CallEnded,
    Carries,
    Event,
    HeaderChange,
    Observed,
    Reply,
    RequestBody,
    RequestHeaders,
)
from sidecar.extproc.waiting import DeadlinePassed, decode_answer, stop, while_client_waits
from sidecar.jsontext import windows
from sidecar.observability.record import AccessRecord
from sidecar.observability.timing import Stopwatch
from sidecar.pipeline.request import DecodeRewrite, InboundRequest, ServedAnswer, ServedStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.struct_pb2 import Struct

    from sidecar.api import Api
    from sidecar.extproc.channel import Context
    from sidecar.extproc.companions import Companions
    from sidecar.extproc.observation import Observation
    from sidecar.extproc.rules import ServiceRules
    from sidecar.limits import InFlightBudget, Ticket
    from sidecar.pipeline.request import AnswerStream, PipelineResult

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all calls of the process share.

    Attributes:
        rules: what the deployment says.
        run: the pipeline.
        budget: what the process may hold at a time.
        on_answer: called once per answered request with its finished record.
        companions: takes over what has to outlive a call.
        observation: reads the calls that are not to be answered.
    """

    rules: ServiceRules
    run: Callable[[InboundRequest], Awaitable[PipelineResult]]
    budget: InFlightBudget
    on_answer: Callable[[AccessRecord], None]
    companions: Companions
    observation: Observation


class Call:
    """One call: feeds its events to the exchange, sends the replies, keeps the record."""

    def __init__(self, shared: Shared, context: Context) -> None:
        self._shared = shared
        self._rules = shared.rules
        self._companions = shared.companions
        self._channel = Channel(context)
        self._record = AccessRecord()
        self._stopwatch = Stopwatch()
        self._started = 0.0
        self._api: Api | None = None
        self._detail = ""
        self._task: asyncio.Task[Any] | None = None
        self._shutting_down = False
        self._relaying = False
        self._answered = False

    async def serve(self) -> None:
        """Answer the call and account for it."""
        event: Event | None = None
        self._task = asyncio.current_task()
        try:
            event = await self._channel.read()
            await self._dispatch(event)
        except ClientLeft as left:
            # Nobody is there to be told; the accounting below is all that is left to do.
            release_frames(left)
        except SidecarError as error:
            await self._fail(error)
            release_frames(error)
        except asyncio.CancelledError:
            if not self._shutting_down or self._task is None:
                raise
            self._task.uncancel()
            await self._fail(Overloaded("this sidecar is shutting down; retry"))
        except Exception as error:
            self._note_request_id()
            logger.exception("request failed in the sidecar", extra={"request_id": self._record.request_id})
            await self._fail(InternalError("internal error of the sidecar; its log has the details"))
            release_frames(error)
        finally:
            if self._answered or isinstance(event, RequestHeaders):
                self._account()
            await self._channel.close()

    def shut_down(self) -> None:
        """End the call with an answer of its own: the process is about to stop."""
        if self._task is not None and not self._shutting_down:
            self._shutting_down = True
            self._task.cancel()

    async def _dispatch(self, event: Event) -> None:
        # The clocks start with the request, not with the call.
        self._stopwatch = Stopwatch()
        self._started = asyncio.get_running_loop().time()
        match event:
            case RequestHeaders():
                await self._request(event)
            case CallEnded():
                pass
            case Observed():
                await self._shared.observation.watch(self._channel, event)
            case _:
                raise UnsupportedBodyMode(
                    "the ext_proc filter sends no request headers; set "
                    "processing_mode.request_header_mode to SEND"
                )

    async def _request(self, event: RequestHeaders) -> None:
        head = event.head
        self._record.request_id = identity.request_id(head)
        self._api = api_for_path(head.path) if head.method == "POST" else None
        self._record.api = "" if self._api is None else self._api.name
        admission = self._rules.admission
        match decide(event, self._api, admission):
            case PassThrough(change):
                await self._pass_through(
                    event, PassthroughExchange(event.mode, change, admission.control_headers)
                )
            case Coordinate(api):
                exchange = CoordinatedExchange(event.mode, admission.max_body, admission.control_headers)
                with ExitStack() as cleanup:
                    with self._shared.budget.admit() as ticket:
                        stream = await self._coordinate(event, api, exchange, ticket, cleanup)
                    if stream is not None:
                        # The request counts until its answer has ended; its bytes are gone.
                        with ticket:
                            await self._serve_stream(stream)
                if self._record.outcome == "ok":
                    await self._see_off(exchange)

    async def _pass_through(self, event: Event, exchange: PassthroughExchange) -> None:
        self._record.outcome = "passthrough"
        self._record.api = ""
        while True:
            for reply in exchange.receive(event):
                self._record.request_bytes = exchange.request_bytes
                await self._send(reply, last=exchange.finished)
            if exchange.finished:
                self._answered = True
                return
            with self._stopwatch.waiting():
                event = await self._channel.read()

    async def _coordinate(
        self,
        event: RequestHeaders,
        api: Api,
        exchange: CoordinatedExchange,
        ticket: Ticket,
        cleanup: ExitStack,
    ) -> ServedStream | None:
        """Take the request in and answer it, but for an answer that is still to be streamed."""
        await self._feed(exchange, event)
        await self._upload(exchange, ticket)
        if not exchange.request_bytes:
            raise BadRequest(f"POST {event.head.path} needs a JSON body")
        result = await self._within_deadline(
            # Only the pipeline holds the body from here on.
            self._shared.run(
                InboundRequest(
                    head=event.head,
                    api=api,
                    body=exchange.take_body(),
                    request_id=self._record.request_id,
                    traceparent=identity.traceparent(event.head, self._channel.metadata("traceparent")),
                    record=self._record,
                    ticket=ticket,
                    stopwatch=self._stopwatch,
                    can_stream_answer=event.mode is BodyMode.FULL_DUPLEX_STREAMED,
                    cleanup=cleanup,
                )
            ),
        )
        match result:
            case DecodeRewrite() if result.alongside is not None:
                beside = asyncio.create_task(result.alongside())
                await self._rewrite_beside(exchange, result, beside, ticket)
            case DecodeRewrite():
                await self._rewrite(exchange, result, last=True)
            case ServedAnswer():
                await self._serve_whole(result)
            case ServedStream():
                return result
        return None

    async def _rewrite(self, exchange: CoordinatedExchange, rewrite: DecodeRewrite, *, last: bool) -> None:
        self._record.outcome = "ok"
        self._record.stage = "decode"
        change = HeaderChange(
            rewrite.set_headers, rewrite.remove_headers, self._rules.admission.clear_route_cache
        )
        for reply in exchange.rewrite(change, rewrite.body):
            await self._send(reply, last=last and exchange.finished)
        self._answered = self._answered or last

    async def _rewrite_beside(
        self,
        exchange: CoordinatedExchange,
        rewrite: DecodeRewrite,
        beside: asyncio.Task[None],
        ticket: Ticket,
    ) -> None:
        """Send the rewrite, and fail the request if the call beside it fails before decode answers."""
        stage = self._record.stage
        try:
            await self._rewrite(exchange, rewrite, last=False)
            answer = await decode_answer(self._channel, beside, lambda event: self._feed(exchange, event))
        except BaseException as error:
            await stop(beside, self._record.request_id)
            self._record.stage = stage
            left = isinstance(error, ClientLeft | asyncio.CancelledError) and not self._shutting_down
            if left and exchange.finished:
                self._companions.call_ended_early(self._record.request_id)
            raise
        self._answered = True
        self._companions.calls_outlast_rewrites = True
        if answer is None:
            # Nothing can fail here any more. With the call open, a dying sidecar would take decode along.
            return
        if answer.status < HTTPStatus.MULTIPLE_CHOICES:
            # Before the reply: Envoy ends the call as soon as it has it.
            self._companions.adopt(beside, ticket, self._record.request_id)
        else:
            # Nobody fetches from this prefill any more.
            await stop(beside, self._record.request_id)
        await self._feed(exchange, answer)

    async def _serve_whole(self, served: ServedAnswer) -> None:
        self._record.outcome = "served"
        message = replies.served(served.status, served.headers, served.body, self._metadata())
        await self._write(message, last=True)

    async def _serve_stream(self, served: ServedStream) -> None:
        self._record.outcome = "served"
        head = replies.served_head(served.status, served.headers, self._metadata())
        self._relaying = True
        await self._write(head, last=False)
        with self._stopwatch.waiting():
            relay = self._relay(served.body)
            await while_client_waits(self._channel, relay, self._record.request_id, deadline=None)

    async def _relay(self, stream: AnswerStream) -> None:
        """Pass the body on as it arrives; no piece waits for the next one to know whether it is the last."""
        async for chunk in stream.chunks():
            for piece in windows([chunk], CHUNK_SIZE):
                await self._write(replies.served_piece(piece, end_of_stream=False), last=False)
        totals = self._metadata("total_ms", "overhead_ms")
        await self._write(replies.served_piece(b"", end_of_stream=True, metadata=totals), last=True)

    async def _upload(self, exchange: CoordinatedExchange, ticket: Ticket) -> None:
        """Read until the body is complete, within the time and the bytes allowed."""
        limit = min(self._rules.read_timeout, self._rules.request_deadline)
        try:
            async with asyncio.timeout_at(self._started + limit):
                while not exchange.complete:
                    with self._stopwatch.waiting():
                        event = await self._channel.read()
                    await self._feed(exchange, event)
                    if isinstance(event, RequestBody):
                        ticket.reserve(len(event.data))
        except TimeoutError:
            if self._rules.request_deadline < self._rules.read_timeout:
                raise self._deadline_exceeded() from None
            raise BodyTimeout(
                f"the request body did not arrive within {limit:g} s (ext_proc.read_timeout)"
            ) from None
        finally:
            self._record.request_bytes = exchange.request_bytes

    async def _within_deadline(self, work: Awaitable[PipelineResult]) -> PipelineResult:
        deadline = self._started + self._rules.request_deadline
        try:
            return await while_client_waits(self._channel, work, self._record.request_id, deadline=deadline)
        except DeadlinePassed:
            raise self._deadline_exceeded() from None

    async def _see_off(self, exchange: CoordinatedExchange) -> None:
        """Answer what Envoy may still send about an answered request: the trailers of a buffered one."""
        while not exchange.finished:
            event = await self._channel.read()
            if isinstance(event, CallEnded):
                return
            await self._feed(exchange, event)

    async def _feed(self, exchange: CoordinatedExchange, event: Event) -> None:
        for reply in exchange.receive(event):
            await self._send(reply)

    def _deadline_exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no decode request within {self._rules.request_deadline:g} s (ext_proc.request_deadline); "
            f"it was at step {self._record.stage}"
        )

    async def _send(self, reply: Reply, *, last: bool = False) -> None:
        match reply.carries:
            case Carries.NOTHING:
                metadata = None
            case Carries.RECORD:
                metadata = self._metadata()
            case Carries.TOTALS:
                metadata = self._metadata("total_ms", "overhead_ms", "request_bytes")
        await self._write(replies.build(reply, metadata), last=last)

    async def _write(self, message: bytes, *, last: bool) -> None:
        # Envoy resets the call as soon as it has the last reply, often before this write is reported done.
        self._answered = self._answered or last
        await self._channel.write(message)

    async def _fail(self, error: SidecarError) -> None:
        """Answer with the error, unless the request is answered already."""
        if self._answered:
            return
        self._note_request_id()
        self._detail = error.detail
        self._record.outcome = error.outcome
        self._record.error = error.code
        self._record.stage = error.stage or self._record.stage
        request_id = self._record.request_id
        shape = default_error_body if self._api is None else self._api.error_body
        body = shape(error, request_id, expose_upstream=self._rules.expose_upstream)
        if self._relaying:
            message = replies.served_piece(
                _error_event(self._record.api, body), end_of_stream=True, metadata=self._metadata()
            )
        else:
            message = replies.immediate(error, body, request_id, self._metadata())
        with suppress(ClientLeft):
            await self._write(message, last=True)

    def _note_request_id(self) -> None:
        # A call can fail before its head is read.
        self._record.request_id = self._record.request_id or identity.new_request_id()

    def _metadata(self, *names: str) -> Struct:
        """The record as dynamic metadata, timed now: the keys named, or all of them."""
        self._time()
        values = self._record.strings()
        return replies.metadata_struct(
            self._rules.metadata_namespace, {name: values[name] for name in names} if names else values
        )

    def _time(self) -> None:
        self._record.total_ms = self._stopwatch.total_ms()
        self._record.overhead_ms = self._stopwatch.overhead_ms()

    def _account(self) -> None:
        if not self._answered:
            self._time()
        if not self._answered and not self._relaying:
            left = self._record.strings() | {"outcome": "client_left"}
            logger.info("client left before the answer", extra=left)
            return
        fields = self._record.strings()
        if self._detail:
            fields["detail"] = self._detail
        what = "request answered" if self._answered else "client left during the answer"
        logger.info(what, extra=fields)
        try:
            self._shared.on_answer(self._record)
        except Exception:
            logger.exception("on_answer failed", extra={"request_id": self._record.request_id})


def _error_event(api: str, body: bytes) -> bytes:
    """The error as the last server-sent event of a stream that broke off, maybe in the middle of an event."""
    name = b"event: error\n" if api == "messages" else b""
    return b"\n\n" + name + b"data: " + body + b"\n\n"
