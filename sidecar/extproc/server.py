"""The gRPC server of the Envoy side: start, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # missing from the stubs

from sidecar.extproc.listener import Listener, ListenError, listen
from sidecar.extproc.service import SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sidecar.extproc.service import ExternalProcessor

logger = logging.getLogger(__name__)

NOTICE = 5.0
"""Seconds between NOT_SERVING and the first refused call: two health checks, two seconds apart, and slack."""

_LAST_WORDS = 1.0
"""Seconds for the answers to requests that have not ended when the drain time is over."""
_LIVENESS = ""
_ANY_NUMBER = 2**31 - 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_OPTIONS: Sequence[tuple[str, int]] = (
    # A second process on the same port is a mistake to report, not a load balancer.
    ("grpc.so_reuseport", 0),
    # Message sizes are Envoy's to bound: a BUFFERED body over ext_proc.max_request_body_size has to arrive to
    # be answered 413, and one that passes through may have any size.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Admission is the sidecar's own (`limits`): gRPC would cut a burst of calls off without an answer.
    ("grpc.server.max_pending_requests", _ANY_NUMBER),
    ("grpc.server.max_pending_requests_hard_limit", _ANY_NUMBER),
    # Envoy pings idle connections as often as its operator likes.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
    ("grpc.http2.max_ping_strikes", 0),
)


class Server:
    """One listening address with the ext_proc service and gRPC health on it.

    Health: the empty service name is liveness and stays SERVING until the process ends, the name of the
    ext_proc service is readiness.

    Args:
        processor: the service.
        address: `host:port`, `[v6]:port` or `unix:/path`.
        cert_path: directory with `tls.crt` and `tls.key`; "" serves plaintext.
        drain_timeout: seconds that running requests get at shutdown, the notice not counted.
        notice: seconds between NOT_SERVING and the first refused call.

    Attributes:
        is_ready: what readiness says now.
    """

    def __init__(
        self,
        processor: ExternalProcessor,
        address: str,
        *,
        cert_path: str = "",
        drain_timeout: float,
        notice: float = NOTICE,
    ) -> None:
        self._processor = processor
        self._address = address
        self._cert_path = cert_path
        self._drain_timeout = drain_timeout
        self._notice = notice
        self._health = health.HealthServicer()
        self.is_ready = False
        self._server: grpc.aio.Server | None = None
        self._listener: Listener | None = None

    async def start(self) -> str:
        """Listen, not ready yet.

        Returns:
            The address, with the actual port.

        Raises:
            ListenError: the address or the certificate cannot be used.
        """
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((self._processor.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._listener = listen(server, self._address, self._credentials())
        self._server = server
        await self._health.set(_LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.ready(serving=False)
        await server.start()
        logger.info("ext_proc listens", extra={"address": self._listener.address})
        return self._listener.address

    async def ready(self, serving: bool) -> None:
        """Tell health checks whether requests may come."""
        self.is_ready = serving
        states = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE_NAME, states.SERVING if serving else states.NOT_SERVING)

    async def serve(self) -> None:
        """Be ready until SIGTERM or SIGINT, then drain; a second signal stops at once."""
        with _signals() as received:
            await self.ready(serving=True)
            await received.get()
            logger.info("draining", extra={"drain_timeout_s": self._drain_timeout})
            drain = asyncio.create_task(self.drain())
            again = asyncio.create_task(received.get())
            await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
            if not drain.done():
                logger.warning("second signal: stopping without waiting for running requests")
                drain.cancel()
                await asyncio.wait({drain})
                self._processor.shut_down_calls()
                await self.stop(_LAST_WORDS)
            elif (error := drain.exception()) is not None:
                raise error

    async def drain(self) -> None:
        """Turn away new requests, let running ones finish, stop.

        Readiness goes first, and calls are accepted for the notice time: an Envoy that has not checked yet
        still sends them.
        """
        await self.ready(serving=False)
        await asyncio.sleep(self._notice)
        stopping = asyncio.create_task(self._stop_when_done())
        self._processor.end_observation()
        await asyncio.wait({stopping}, timeout=self._drain_timeout)
        # A call that is cut off would be answered by Envoy, without a body and without a record.
        self._processor.shut_down_calls()
        await stopping

    async def _stop_when_done(self) -> None:
        await self.stop(self._drain_timeout + _LAST_WORDS)
        await self._processor.ended()

    async def stop(self, grace: float | None = None) -> None:
        """Stop listening; calls still running after `grace` seconds are cancelled."""
        if self._server is not None:
            await self._server.stop(grace)
        if self._listener is not None:
            self._listener.close()

    def _credentials(self) -> grpc.ServerCredentials | None:
        if not self._cert_path:
            return None
        directory = Path(self._cert_path)
        try:
            pair = ((directory / "tls.key").read_bytes(), (directory / "tls.crt").read_bytes())
        except OSError as error:
            raise ListenError(
                f"ext_proc.tls.cert_path: cannot read {error.filename!r}: {error.strerror}"
            ) from error
        return grpc.ssl_server_credentials([pair])


@contextmanager
def _signals() -> Iterator[asyncio.Queue[signal.Signals]]:
    """Collect the signals that ask for an end, instead of dying from them."""
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _SIGNALS:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
