"""`epd-sidecar health`: asks a sidecar how it is, through the gRPC health service that Envoy asks.

For container health checks, `helm test`, and people: one line says it, and so does the exit code.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sidecar.config.values import address_to_connect, split_listen_address
from sidecar.extproc.service import SERVICE_NAME

if TYPE_CHECKING:
    from sidecar.config import ExtProcSettings

_UNIX = "unix:"
_LONGEST_REASON = 300

_OPTIONS = (
    # A proxy of the environment is for the outside; a health check asks the sidecar itself.
    ("grpc.enable_http_proxy", 0),
)


class Unhealthy(Exception):
    """The sidecar is not serving, or did not answer; the message says which, in one line."""


class CannotAsk(Exception):
    """The question is wrong: an address, or a file that cannot be read. The message says what to do."""


@dataclass(frozen=True)
class Target:
    """Whom to ask, and over what.

    Attributes:
        address: `host:port`, `[v6]:port` or `unix:/path`.
        roots: certificates to trust (PEM), None for plaintext.
        server_name: name to expect in the certificate; None for the host of the address.
        own_certificate: whether `roots` is the server's own certificate, which is then trusted whatever name
            it carries.
    """

    address: str
    roots: bytes | None = None
    server_name: str | None = None
    own_certificate: bool = False


def target(
    listener: ExtProcSettings | None, address: str | None, *, ca: Path | None = None, name: str | None = None
) -> Target:
    """Whom to ask: the sidecar that serves with these settings on this machine, unless the others say more.

    Args:
        listener: its settings, if they are at hand; may be None when there is an address.
        address: `host:port`, `[v6]:port` or `unix:/path` instead of the one in the settings.
        ca: PEM file with certificates to trust instead of the sidecar's own.
        name: name in the certificate instead of the host of the address.

    Raises:
        CannotAsk: an address or a file that cannot be used, or a name without TLS.
    """
    if address is not None:
        _check_address(address)
    elif listener is not None:
        address = _local_address(listener.listen)
    else:
        raise CannotAsk("there is no address to ask; give --address or --config")
    own = Path(listener.tls.cert_path) / "tls.crt" if listener and listener.tls.cert_path else None
    trusted = ca or own
    if trusted is None:
        if name is not None:
            raise CannotAsk("--name is for TLS; add --ca FILE")
        return Target(address)
    return Target(address, _certificates(trusted), name, own_certificate=ca is None)


def _check_address(address: str) -> None:
    try:
        usable = (
            address.startswith(f"{_UNIX}/")
            if address.startswith(_UNIX)
            else split_listen_address(address)[1] > 0
        )
    except ValueError:
        usable = False
    if not usable:
        raise CannotAsk(f"--address {address!r} is not host:port, [v6]:port or unix:/path")


def _local_address(listen: str) -> str:
    try:
        return address_to_connect(listen)
    except ValueError as error:
        raise CannotAsk(f"ext_proc.listen: {error}; name the sidecar's with --address") from None


def _certificates(path: Path) -> bytes:
    try:
        pem = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except ssl.SSLError as error:
        raise CannotAsk(f"{str(path)!r} has no certificates in PEM form: {error.reason}") from error
    except OSError as error:
        raise CannotAsk(f"cannot read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise CannotAsk(f"{str(path)!r} has no certificates in PEM form") from error
    return pem


def check(target: Target, *, live: bool, timeout: float) -> None:
    """Ask once, for readiness or (`live`) for liveness, and return if the answer is SERVING.

    Args:
        target: whom to ask.
        live: ask whether the process runs, not whether requests are welcome.
        timeout: seconds for everything.

    Raises:
        Unhealthy: any other answer, or none within the timeout.
    """
    if target.own_certificate and target.server_name is None:
        target = replace(target, server_name=_name_in_certificate(target, timeout))
    service = "" if live else SERVICE_NAME
    with closing(_channel(target)) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            raise Unhealthy(_reason(error)) from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unhealthy(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(target: Target) -> grpc.Channel:
    if target.roots is None:
        return grpc.insecure_channel(target.address, options=_OPTIONS)
    options: tuple[tuple[str, str | int], ...] = _OPTIONS
    if target.server_name:
        options = (*options, ("grpc.ssl_target_name_override", target.server_name))
    return grpc.secure_channel(target.address, grpc.ssl_channel_credentials(target.roots), options=options)


def _name_in_certificate(target: Target, timeout: float) -> str:
    """The first name of the certificate that the server shows, which has to be the one in `target.roots`.

    gRPC insists on a name. The server's own certificate proves by itself who answers, so that any of its
    names will do.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(cadata=(target.roots or b"").decode("ascii"))
        with _connection(target.address, timeout) as plain, context.wrap_socket(plain) as connection:
            names = (connection.getpeercert() or {}).get("subjectAltName", ())
    except (OSError, ValueError) as error:
        raise Unhealthy(_one_line(f"no TLS connection: {error}")) from error
    if not names:
        raise Unhealthy("the certificate has no subjectAltName, which gRPC clients insist on")
    return str(names[0][1])


def _connection(address: str, timeout: float) -> socket.socket:
    if not address.startswith(_UNIX):
        return socket.create_connection(split_listen_address(address), timeout)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    try:
        connection.connect(address.removeprefix(_UNIX))
    except OSError:
        connection.close()
        raise
    return connection


def _reason(error: grpc.RpcError) -> str:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    if code is grpc.StatusCode.NOT_FOUND:
        return "the health service there does not know the ext_proc service: not a sidecar"
    return _one_line(f"{code.name}: {details}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_REASON]
