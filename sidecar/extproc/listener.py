"""Where the gRPC server listens: TCP or a unix socket, opened so that two processes never fight over it."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import grpc

_UNIX = "unix:"
_LONGEST_SOCKET_PATH = 107
"""Octets of a unix socket path on Linux, without the closing zero."""


class ListenError(Exception):
    """The address of `ext_proc.listen` or its certificate cannot be used; the message says why."""


class Listener(Protocol):
    """An open listening address."""

    @property
    def address(self) -> str:
        """What clients connect to: `host:port` with the actual port, or `unix:/path`."""

    def close(self) -> None:
        """Give the address up, after the server has stopped."""


def listen(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> Listener:
    """Make `server` listen on `host:port`, `[v6]:port` or `unix:/path`; port 0 takes a free one.

    Raises:
        ListenError: the address is in use, not ours to take, or not valid.
    """
    if address.startswith(_UNIX):
        return _UnixListener(server, Path(address.removeprefix(_UNIX)), credentials)
    return _TcpListener(server, address, credentials)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ListenError(
            f"ext_proc.listen: cannot listen on {address!r}: in use by another process, or not an address of "
            "this host"
        ) from error
    if port == 0:
        raise ListenError(f"ext_proc.listen: cannot listen on {address!r}")
    return port


class _TcpListener:
    def __init__(
        self, server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
    ) -> None:
        port = _bind(server, address, credentials)
        host, _, _ = address.rpartition(":")
        self.address = f"{host}:{port}"

    def close(self) -> None:
        """Nothing to do: the port went with the server."""


class _UnixListener:
    """A unix socket that never disappears under another process.

    gRPC removes the path it was bound to when it stops, whoever owns the path by then. It is therefore bound
    to a private name and renamed; the public path is removed here, and only while it still is our socket.
    """

    def __init__(
        self, server: grpc.aio.Server, path: Path, credentials: grpc.ServerCredentials | None
    ) -> None:
        private = path.with_name(f"{path.name}.{os.getpid()}")
        if len(os.fsencode(private)) > _LONGEST_SOCKET_PATH:
            raise ListenError(
                f"ext_proc.listen: the socket path {str(path)!r} is too long; with the process id it has to "
                f"fit {_LONGEST_SOCKET_PATH} bytes"
            )
        _check_free(path)
        private.unlink(missing_ok=True)
        _bind(server, f"{_UNIX}{private}", credentials)
        private.rename(path)
        self._path = path
        self._identity = _identity(path)
        self.address = f"{_UNIX}{path}"

    def close(self) -> None:
        """Remove the path if it still is the socket opened here."""
        if _identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _check_free(path: Path) -> None:
    """Raise ListenError unless nothing is at `path`, or a socket nobody serves any more."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(
            f"ext_proc.listen: {str(path)!r} exists and is not a socket; remove it or choose another"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise ListenError(f"ext_proc.listen: cannot examine the socket {str(path)!r}: {error}") from error
    raise ListenError(f"ext_proc.listen: {str(path)!r} is in use by another process; give each its own path")
