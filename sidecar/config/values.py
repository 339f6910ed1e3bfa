"""The value types of the configuration: how each is written, checked and printed.

Every parser takes what YAML or an environment variable delivered and raises ValueError (pydantic collects no
other kind) with a text that says what to write instead. Numbers may be quoted ("64" is 64, as the coordinator
reads it); booleans may not, because a quoted "false" is a truthy string wherever the file is read next.
"""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated, TypeGuard
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainSerializer, StrictBool

MEGABYTE = 1 << 20
_LONGEST_SECONDS = 720 * 3600
_LARGEST_MEGABYTES = 1 << 20
_LARGEST_INTEGER = 1 << 53
_HIGHEST_PORT = 65535
_SHORTEST_TOKEN = 16

_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,  # micro sign, as Go prints it
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_PART = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(ns|us|µs|ms|s|m|h)")
_HEADER_NAME = re.compile(r"[!#$%&'+.^_`|~0-9a-z-]+")
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*"
)
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+")

_LOG_LEVELS = {"1": "warning", "2": "info", "3": "debug", "4": "debug", "5": "debug"}

_CONTENT_TYPE = re.compile(r"[a-z]+/[a-z0-9][a-z0-9.+-]{0,63}")
_ENVOY_PREFIXES = ("x-envoy-", "x-forwarded-")
_CREDENTIAL_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
# Removing or overwriting one of these breaks the message, or takes a job that is the sidecar's own.
_UNTOUCHABLE_HEADERS = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
        "traceparent",
    }
)
_CONTROL_HEADERS = frozenset({"epp-profile", "x-epd-hop", "x-epd-phase-token"})


def quoted(value: object) -> str:
    """A scalar as an error message shows it, at most 80 characters; anything else by its kind only."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            text = value if len(value) <= 80 else f"{value[:77]}..."  # noqa: PLR2004 - the 80 of the docstring
            return '"' + text.encode("unicode_escape").decode("ascii") + '"'
        case int() | float():
            return str(value) if abs(value) < _LARGEST_INTEGER else "a number out of range"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return "this value"


def parse_duration(value: object) -> float:
    """Seconds of a Go-style duration such as `30s`, `500ms`, `1m30s` or `1h`; a plain 0 is 0.

    Raises:
        ValueError: no unit, an unknown unit, negative, or longer than 720h.
    """
    text = f"{value:.15g}" if _is_number(value) else value
    text = text.strip() if isinstance(text, str) else ""
    if text == "0":
        return 0.0
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise ValueError(f'{quoted(value)} has no unit; add a unit, for example "{text[:20]}s"')
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f'{quoted(value)} is not a duration; write one such as "30s", "500ms" or "1m30s"')
    nanoseconds = sum(Decimal(number) * _NANOSECONDS[unit] for number, unit in parts)
    if nanoseconds > _LONGEST_SECONDS * 10**9:
        raise ValueError(f"{quoted(text)} is too long; the limit is 720h")
    return int(nanoseconds) / 10**9


def format_duration(seconds: float) -> str:
    """The shortest Go-style text of a duration: `parse_duration` gives the same nanoseconds back."""
    nanoseconds = round(seconds * 10**9)
    if nanoseconds == 0:
        return "0s"
    parts = []
    for unit in ("h", "m", "s", "ms", "us", "ns"):
        count, nanoseconds = divmod(nanoseconds, _NANOSECONDS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _positive_duration(value: object) -> float:
    seconds = parse_duration(value)
    if seconds == 0:
        raise ValueError('0 is not allowed here; write a time limit such as "30s"')
    return seconds


def _is_number(value: object) -> TypeGuard[int | float]:
    # The bound keeps out NaN, infinity, and integers too long to print.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_INTEGER


def _number(value: object, what: str) -> float:
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"-?[0-9]{1,18}", text):
            return int(text)
        if re.fullmatch(r"-?[0-9]{1,18}\.[0-9]{1,18}", text):
            return float(text)
    elif _is_number(value):
        return value
    raise ValueError(f"{quoted(value)} is not {what}")


def _integer(value: object) -> int:
    number = _number(value, "a whole number")
    if number != int(number) or abs(number) > _LARGEST_INTEGER:
        raise ValueError(f"{quoted(value)} is not a whole number")
    return int(number)


def parse_megabytes(value: object) -> int:
    """Bytes of a size written in MB (2^20 bytes), whole or fractional.

    Raises:
        ValueError: not a number (units are not written), not above 0, or above 1048576 MB.
    """
    number = _number(value, "a size; write a number of MB without a unit, for example 64")
    if not 0 < number <= _LARGEST_MEGABYTES or int(number * MEGABYTE) < 1:
        raise ValueError(f"{quoted(value)} MB is out of range; use more than 0 and at most 1048576")
    return int(number * MEGABYTE)


def format_megabytes(size: int) -> float:
    """A size in MB; whole numbers stay integers."""
    return size // MEGABYTE if size % MEGABYTE == 0 else size / MEGABYTE


def parse_log_level(value: object) -> str:
    """The level's name; the coordinator's 1..5 are warning, info and (3, 4, 5) debug."""
    text = str(value).strip().lower() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    level = _LOG_LEVELS.get(text, text)
    if level not in {"error", "warning", "info", "debug"}:
        raise ValueError(
            f"{quoted(value)} is not a log level; use error, warning, info, debug or the coordinator's 1..5"
        )
    return level


def off_word(value: object) -> object:
    """`off` for the boolean that YAML 1.1 makes of the unquoted word, any other value as it is."""
    return "off" if value is False else value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quoted(value)} is not text; put it in quotes")  # noqa: TRY004 - see the module docstring
    return value.strip()


def _port(text: str, *, lowest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not lowest <= int(text) <= _HIGHEST_PORT:
        raise ValueError(f"{quoted(text)} is not a port; use {lowest}..{_HIGHEST_PORT}")
    return int(text)


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        # A name whose last label is a number would be taken for a malformed IPv4 address.
        return _HOST_NAME.fullmatch(host) is not None and not host.rpartition(".")[2].isdigit()
    return True


def split_listen_address(text: str) -> tuple[str, int]:
    """Host (IPv6 without brackets) and port of `host:port` or `[v6]:port`; port 0 means any free port.

    Raises:
        ValueError: no host, no port, or one that is not valid.
    """
    example = 'write host:port, such as "0.0.0.0:9002" or "[::]:9002"'
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not colon or not name or bracketed != (":" in name) or not _is_host(name.lower()):
        raise ValueError(f"{quoted(text)} is not an address to listen on; {example}")
    return name, _port(port, lowest=0)


def address_to_connect(listen: str) -> str:
    """Where a program on the same host finds a listener; raises ValueError for one on any free port."""
    if listen.startswith("unix:"):
        return listen
    host, port = split_listen_address(listen)
    if port == 0:
        raise ValueError(f"{quoted(listen)} takes any free port")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")  # noqa: PLR2004 - IP version
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"  # noqa: PLR2004 - IP version


def _listen_address(value: object) -> str:
    text = str(value) if _is_number(value) else _text(value)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        # 107 bytes is what fits into sockaddr_un on Linux.
        if not path.startswith("/") or len(path.encode()) > 107 or not path.isprintable():  # noqa: PLR2004 - the comment above
            raise ValueError(
                f'{quoted(text)} is not a socket path; write "unix:" and an absolute path of up to 107 bytes'
            )
        return text
    split_listen_address(text)
    return text


def _admin_address(value: object) -> str:
    text = str(value) if _is_number(value) else _text(value)
    if text.startswith("unix:"):
        raise ValueError('unix sockets are not supported here; write host:port, or "" to switch it off')
    if text:
        split_listen_address(text)
    return text


def _base_url(value: object) -> str:
    text = _text(value)
    example = "write a base URL such as http://host:8000"
    # Nothing of a URL that may hold a password is repeated.
    if "@" in text:
        raise ValueError(f"credentials in an address are not supported; {example}")
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise ValueError(f"{quoted(text)} has characters that an address cannot have; {example}")
    try:
        url = urlsplit(text)
        host = url.hostname or ""
    except ValueError:
        raise ValueError(f"{quoted(text)} is not an address; {example}") from None
    if url.scheme not in {"http", "https"} or not _is_host(host):
        raise ValueError(f"{quoted(text)} is not an http or https address with a host; {example}")
    if "?" in text or "#" in text:
        raise ValueError(f"an address has no query or fragment; {example}")
    behind_host = url.netloc[len(host) + 2 * (":" in host) :]
    if behind_host:
        _port(behind_host.removeprefix(":"), lowest=1)
    return text.rstrip("/")


def _header_name(value: object) -> str:
    text = _text(value).lower()
    if not _HEADER_NAME.fullmatch(text):
        raise ValueError(
            f"{quoted(text)} is not a header name; write one name without wildcards, colon or spaces"
        )
    return text


def _belongs_to_envoy(name: str) -> bool:
    """Whether the shipped Envoy configurations refuse a rewrite of the header, and with it the request."""
    return name in _UNTOUCHABLE_HEADERS or name.startswith(_ENVOY_PREFIXES)


def _stripped_header(value: object) -> str:
    name = _header_name(value)
    if _belongs_to_envoy(name):
        raise ValueError(
            f"{quoted(name)} cannot be stripped: the request would break; remove it from the list"
        )
    return name


def _forwarded_header(value: object) -> str:
    name = _header_name(value)
    if _belongs_to_envoy(name) or name in _CONTROL_HEADERS:
        raise ValueError(
            f"{quoted(name)} cannot be forwarded: the sidecar sets it itself; remove it from the list"
        )
    if name in _CREDENTIAL_HEADERS:
        raise ValueError(
            f"{quoted(name)} cannot be forwarded: it would replace the client's own; remove it from the list"
        )
    return name


def _content_type(value: object) -> str:
    text = _text(value).lower()
    if not _CONTENT_TYPE.fullmatch(text):
        raise ValueError(
            f"{quoted(text)} is not a content type; write image/png, without parameters or wildcard"
        )
    return text


def _domain(value: object) -> str:
    text = _text(value).lower().rstrip(".")
    if not _is_host(text):
        raise ValueError(
            f"{quoted(text)} is not a host name; write images.example.com, without scheme, port or wildcard"
        )
    return text


def _namespace(value: object) -> str:
    text = _text(value)
    if not _NAMESPACE.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a metadata namespace; use letters, digits and . _ -")
    return text


def _phase_token(value: object) -> str:
    if value == "":
        return ""
    if not isinstance(value, str) or not all("!" <= character <= "~" for character in value):
        raise ValueError("must be text of printable ASCII characters without spaces; put it in quotes")
    if len(value) < _SHORTEST_TOKEN:
        raise ValueError(f"is too short; use at least {_SHORTEST_TOKEN} characters")
    return value


Flag = StrictBool
Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
PositiveDuration = Annotated[float, BeforeValidator(_positive_duration), PlainSerializer(format_duration)]
Megabytes = Annotated[int, BeforeValidator(parse_megabytes), PlainSerializer(format_megabytes)]
Count = Annotated[int, BeforeValidator(_integer), Field(ge=1)]
CountOrUnlimited = Annotated[int, BeforeValidator(_integer), Field(ge=0)]
Port = Annotated[int, BeforeValidator(_integer), Field(ge=1, le=_HIGHEST_PORT)]
ListenAddress = Annotated[str, BeforeValidator(_listen_address)]
AdminAddress = Annotated[str, BeforeValidator(_admin_address)]
BaseUrl = Annotated[str, BeforeValidator(_base_url)]
StrippedHeader = Annotated[str, BeforeValidator(_stripped_header)]
ForwardedHeader = Annotated[str, BeforeValidator(_forwarded_header)]
ContentType = Annotated[str, BeforeValidator(_content_type)]
Domain = Annotated[str, BeforeValidator(_domain)]
Namespace = Annotated[str, BeforeValidator(_namespace)]
PhaseToken = Annotated[
    str,
    BeforeValidator(_phase_token),
    PlainSerializer(lambda token: "set" if token else "not set"),
    Field(repr=False),
]
