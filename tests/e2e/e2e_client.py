"""Raw HTTP towards Envoy, and the requests the end-to-end tests send."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import socket
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MODEL = "simulated-vl"
CHAT = "/v1/chat/completions"
TIMEOUT = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The assistant's text of a non-streamed chat answer."""
        assert self.status == 200, self.body
        return str(self.json["choices"][0]["message"]["content"])


@dataclass(frozen=True)
class Picture:
    """A real JPEG; its size and colour make it distinct."""

    width: int
    height: int
    colour: tuple[int, int, int] = (200, 40, 40)
    data: bytes = field(init=False)

    def __post_init__(self) -> None:
        buffer = io.BytesIO()
        Image.new("RGB", (self.width, self.height), self.colour).save(buffer, "JPEG")
        object.__setattr__(self, "data", buffer.getvalue())

    @property
    def url(self) -> str:
        return "data:image/jpeg;base64," + base64.b64encode(self.data).decode()

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.url}}

    @property
    def names(self) -> tuple[str, str]:
        """What the simulator's answer calls it: the size, and the start of its SHA-256."""
        return f"{self.width}x{self.height}", hashlib.sha256(self.data).hexdigest()[:8]


CAT = Picture(320, 240)
DOG = Picture(224, 448, (10, 200, 60))


def new_id() -> str:
    return str(uuid.uuid4())


def chat(text: str = "Compare the pictures.", *pictures: Picture, **more: Any) -> dict[str, Any]:
    """A chat request: the pictures first, then the text."""
    content: list[dict[str, Any]] = [picture.part for picture in pictures]
    content.append({"type": "text", "text": text})
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 40, **more}


def as_body(body: object) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def request(
    base: str,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request with a content-length; an early answer to an unfinished upload is read, too."""
    host, port = base.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT)
    fields = {"content-type": "application/json", **(headers or {})}
    try:
        data = None if body is None else as_body(body)
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in fields.items():
            connection.putheader(name, value)
        if data is not None:
            connection.putheader("content-length", str(len(data)))
        connection.endheaders()
        if data is not None:
            try:
                connection.send(data)
            except (BrokenPipeError, ConnectionResetError):
                return read_answer(connection)
        return read_answer(connection)
    finally:
        connection.close()


def read_answer(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    answer = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, answer, response.read())


class Upload:
    """A request sent piece by piece over one socket, chunked, with optional trailers."""

    def __init__(self, base: str, path: str, headers: Mapping[str, str] | None = None) -> None:
        host, port = base.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        lines = [f"POST {path} HTTP/1.1", f"host: {host}:{port}", "transfer-encoding: chunked"]
        fields = {"content-type": "application/json", **(headers or {})}
        lines += [f"{name}: {value}" for name, value in fields.items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def send(self, piece: bytes) -> None:
        self.socket.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n")

    def finish(self, trailers: Iterable[tuple[str, str]] = ()) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in trailers)
        self.socket.sendall(f"0\r\n{lines}\r\n".encode())

    def answer(self) -> Answer:
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        fields = {name.lower(): value for name, value in response.getheaders()}
        answer = Answer(response.status, fields, response.read())
        response.close()
        self.leave()
        return answer

    def leave(self) -> None:
        """Close the connection, whatever is still on its way."""
        self.socket.close()


def request_h2(
    base: str, path: str, body: bytes, headers: Mapping[str, str], trailers: Iterable[tuple[str, str]] = ()
) -> Answer:
    """One POST over HTTP/2 without TLS, optionally with trailers."""
    host, port = base.removeprefix("http://").split(":")
    fields = [
        *((":method", "POST"), (":path", path), (":scheme", "http"), (":authority", f"{host}:{port}")),
        *headers.items(),
    ]
    trailers = list(trailers)
    connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as link:
        connection.initiate_connection()
        connection.send_headers(1, fields)
        left = memoryview(body)
        answer: dict[str, str] = {}
        received = bytearray()
        while True:
            while left and (room := min(connection.local_flow_control_window(1), 16_384, len(left))):
                connection.send_data(1, bytes(left[:room]), end_stream=room == len(left) and not trailers)
                left = left[room:]
                if not left and trailers:
                    connection.send_headers(1, trailers, end_stream=True)
            link.sendall(connection.data_to_send())
            for event in connection.receive_data(link.recv(65_536)):
                match event:
                    case ResponseReceived():
                        answer = {str(name): str(value) for name, value in event.headers}
                    case DataReceived():
                        received += event.data
                        connection.acknowledge_received_data(event.flow_controlled_length, 1)
                    case StreamEnded():
                        return Answer(int(answer.pop(":status")), answer, bytes(received))
