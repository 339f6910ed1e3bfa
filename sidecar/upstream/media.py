"""Downloads media that a client's request points to, without becoming the client's way into the network."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from sidecar.errors import BadRequest, SidecarError, StepFailed, StepRejected, StepTimeout
from sidecar.upstream.addresses import AddressBlocked, SystemLookUp, guarded_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.upstream.addresses import AddressCheck, LookUp

_MAX_REDIRECTS = 5
_MAX_URL = 16 << 10
"""Characters of a URL: above what signed URLs need, below what a media server would read."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_VISIBLE_ASCII = re.compile(r"[!-~]*")
_HOST_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?\.?")
_SHOWN = 64
"""Characters of an upstream's header value that an error message repeats."""


@dataclass(frozen=True, slots=True)
class Media:
    """One downloaded item.

    Attributes:
        content_type: media type of the answer, lower-case, without parameters.
        data: the whole body, never empty.
    """

    content_type: str
    data: bytearray


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one fetch may bring: media types, bytes, and who is asked before bytes are held."""

    types: frozenset[str]
    reserve: Callable[[int], None]
    max_size: int


class MediaFetcher:
    """Fetches http(s) media from hosts that clients name.

    Sends nothing of the client and nothing secret: no cookies, no credentials, no proxy of the environment.
    Has its own pool, so that slow media servers cannot use up the connections to the gateway. Create it
    inside a running event loop and close it there.

    Args:
        policy: judges every address right before it is connected to.
        allowed_domains: the only hosts to fetch from, by exact name; empty for any.
        download_timeout: for one whole fetch with its redirects, in seconds.
        max_download_size: of one item, in bytes.
        user_agent: `epd-sidecar/<version>`.
        max_connections: open connections at a time, over all hosts.
        look_up: addresses of a host name; the system's resolver if None.

    Raises:
        ValueError: an allowed domain is not a host name.
    """

    def __init__(
        self,
        policy: AddressCheck,
        *,
        allowed_domains: Iterable[str] = (),
        download_timeout: float,
        max_download_size: int,
        user_agent: str,
        max_connections: int = 100,
        look_up: LookUp | None = None,
    ) -> None:
        self._allowed_domains = frozenset(map(_normal_domain, allowed_domains))
        self._timeout = download_timeout
        self._max_size = max_download_size
        self._system_look_up = SystemLookUp()
        self._session = aiohttp.ClientSession(
            connector=guarded_connector(
                policy, look_up or self._system_look_up, max_connections=max_connections
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Media is compressed already, and an inflated body would defeat the size cap.
            headers={"user-agent": user_agent, "accept-encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(),
        )

    async def close(self) -> None:
        """Close the pool; fetches under way fail."""
        await self._session.close()
        self._system_look_up.close()

    def check_url(self, url: str) -> None:
        """Refuse a URL this fetcher would not ask for, before anything is sent.

        Raises:
            BadRequest: stage `media`; not http(s), no or a wrong host, credentials, or a host that is not
                in `allowed_domains`.
        """
        self._target(url)

    async def fetch(
        self,
        url: str,
        allowed_types: frozenset[str],
        reserve: Callable[[int], None],
        max_size: int | None = None,
    ) -> Media:
        """Download one item.

        Args:
            url: as the client wrote it.
            allowed_types: media types the answer may have.
            reserve: called with a number of bytes before they are held; what it raises ends the fetch.
            max_size: bytes this item may have, where that is not `max_download_size`.

        Raises:
            BadRequest: stage `media`; the URL, its host, or what is found there is at fault.
            StepRejected: the media server answered 4xx.
            StepFailed: the media server answered 5xx or something that is not HTTP, or could not be reached.
            StepTimeout: `download_timeout` passed.
        """
        target = self._target(url)
        wanted = _Wanted(allowed_types, reserve, max_size or self._max_size)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._follow(target, wanted)
        except TimeoutError:
            raise StepTimeout(
                "media",
                f"media from {target.host} did not arrive within download_timeout ({self._timeout:g} s); "
                "use a faster host or smaller media",
            ) from None

    async def _follow(self, url: URL, wanted: _Wanted) -> Media:
        start = url.host
        for _ in range(_MAX_REDIRECTS + 1):
            found = await self._get(url, wanted)
            if isinstance(found, Media):
                return found
            url = self._target(found, base=url)
        raise _refused(f"media from {start} takes more than {_MAX_REDIRECTS} redirects; use the final URL")

    def _target(self, reference: str, base: URL | None = None) -> URL:
        """An absolute URL this fetcher may ask for; every hop of a redirect passes here."""
        if len(reference) > _MAX_URL:
            raise _refused(f"media URL is longer than {_MAX_URL} characters")
        try:
            url = _absolute(reference, base)
        except ValueError:
            raise _refused("media URL is not valid; send http(s)://<host>/<path>") from None
        if url.scheme not in {"http", "https"}:
            raise _refused("media URL must start with http:// or https://, or be a data URI")
        host = url.raw_host
        if not host:
            raise _refused("media URL has no host; send http(s)://<host>/<path>")
        if "%" in host or (":" not in host and not _HOST_NAME.fullmatch(host)) or not _is_decodable(url):
            raise _refused("media URL has an invalid host name")
        if url.raw_user is not None or url.raw_password is not None:
            raise _refused(f"media URL for {host} carries credentials, which are never sent; remove them")
        if self._allowed_domains and host.removesuffix(".") not in self._allowed_domains:
            raise _refused(f"media host {host} is not in allowed_domains; use an allowed host or a data URI")
        return url

    async def _get(self, url: URL, wanted: _Wanted) -> Media | str:
        """One hop: the media, or the location of a redirect.

        Leaving the response before its end closes the connection.
        """
        host = url.host or ""
        # The last item turns a 406 into the message that names the type found and the types allowed.
        accept = ", ".join([*sorted(wanted.types), "*/*;q=0.1"])
        try:
            async with self._session.get(url, allow_redirects=False, headers={"accept": accept}) as response:
                if response.status in _REDIRECTS:
                    return _location(response, host)
                _check_status(response.status, host)
                content_type = _content_type(response, host, wanted.types)
                return Media(content_type, await _read(response, host, wanted))
        except aiohttp.ClientError as error:
            # Not chained: the text of some of these errors has the URL with its query.
            raise _explained(error, host) from None


async def _read(response: aiohttp.ClientResponse, host: str, wanted: _Wanted) -> bytearray:
    announced = response.content_length
    if announced is not None:
        _check_size(announced, host, wanted.max_size)
        wanted.reserve(announced)
    data = bytearray()
    async for chunk in response.content.iter_any():
        _check_size(len(data) + len(chunk), host, wanted.max_size)
        if announced is None:
            wanted.reserve(len(chunk))
        data += chunk
    if not data:
        raise _refused(f"media from {host} is empty")
    return data


def _check_size(size: int, host: str, limit: int) -> None:
    if size > limit:
        raise _refused(
            f"media from {host} is larger than {limit / (1 << 20):g} MB (max_download_size, or that of its "
            "modality); use smaller media"
        )


def _absolute(reference: str, base: URL | None) -> URL:
    """The URL with its authority normalised and the rest as written; raises ValueError.

    Signatures cover the path and query byte for byte, so `%2F` must not come out as `/`.
    """
    url = URL(reference, encoded=_VISIBLE_ASCII.fullmatch(reference) is not None)
    if base is not None:
        url = base.join(url)
    return URL.build(
        scheme=url.scheme,
        authority=URL(str(url)).raw_authority,
        path=url.raw_path,
        query_string=url.raw_query_string,
        encoded=True,
    )


def _is_decodable(url: URL) -> bool:
    """Whether the host is readable: `xn--` labels may hold what is no punycode."""
    try:
        return bool(url.host)
    except UnicodeError:
        return False


def _normal_domain(domain: str) -> str:
    """The form in which a URL's host is compared: lower-case, IDNA-encoded, without the final dot."""
    try:
        host = URL.build(scheme="http", host=domain).raw_host
    except ValueError:
        host = None
    if not host or "%" in host or (":" not in host and not _HOST_NAME.fullmatch(host)):
        raise ValueError(
            f"allowed_domains: {domain!r} is not a host name; list exact names like cdn.example.com"
        )
    return host.removesuffix(".")


def _location(response: aiohttp.ClientResponse, host: str) -> str:
    location = response.headers.get("location")
    if not location:
        raise StepFailed("media", f"media server {host} answered HTTP {response.status} without a location")
    return location


def _check_status(status: int, host: str) -> None:
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise StepRejected(
            "media",
            status,
            f"media rejected the request: HTTP {status} from {host}; check that the URL is public",
        )
    # Part of the media (206) is as useless as none: no range was asked for.
    if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or status == HTTPStatus.PARTIAL_CONTENT:
        raise StepFailed(
            "media", f"media server {host} answered HTTP {status}; try again or use another host"
        )


def _content_type(response: aiohttp.ClientResponse, host: str, allowed_types: frozenset[str]) -> str:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        raise _refused(
            f"media from {host} comes with content-encoding {encoding[:_SHOWN]!a}; it must be served as it is"
        )
    content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    allowed = ", ".join(sorted(allowed_types))
    if not content_type:
        raise _refused(f"media from {host} has no content-type; allowed here: {allowed}")
    if content_type not in allowed_types:
        raise _refused(f"media from {host} has type {content_type[:_SHOWN]!a}; allowed here: {allowed}")
    return content_type


def _explained(error: aiohttp.ClientError, host: str) -> SidecarError:
    """What a failed exchange means to the client."""
    match error:
        case aiohttp.ClientConnectorError(os_error=AddressBlocked() as blocked):
            return _refused(
                f"media host {host} is blocked: it is {blocked.reason}; use a host that is publicly reachable"
            )
        case aiohttp.ClientConnectorError(os_error=socket.gaierror()):
            return _refused(f"media host {host} does not resolve; check its name")
        case aiohttp.InvalidURL():
            return _refused(f"media URL for {host} is not valid; write an IPv4 address as a.b.c.d")
        case aiohttp.ClientConnectorError():
            detail = str(error)
        case _:
            detail = type(error).__name__
    return StepFailed("media", f"media server {host} failed; try again or use another host", detail=detail)


def _refused(message: str) -> BadRequest:
    return BadRequest(message, stage="media")
