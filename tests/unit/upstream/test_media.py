from __future__ import annotations

import asyncio
import gzip
import socket
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from sidecar.errors import BadRequest, Overloaded, StepFailed, StepRejected, StepTimeout
from sidecar.upstream.addresses import AddressPolicy
from sidecar.upstream.media import MediaFetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sidecar.upstream.addresses import IPAddress

IMAGES = frozenset({"image/png", "image/jpeg"})
PIXELS = b"\x89PNG" + bytes(range(256)) * 40
MAX_SIZE = 64 << 10
CHUNK = 8 << 10


class OnlyAddress:
    """A policy for tests: one address, the real policy for all others."""

    def __init__(self, address: str) -> None:
        self._allowed = ip_address(address)
        self.judged: list[str] = []

    def check(self, ip: IPAddress) -> str | None:
        self.judged.append(str(ip))
        return None if ip == self._allowed else AddressPolicy(allow_private_networks=True).check(ip)


class Names:
    """A resolver for tests: each look-up of a name takes its next answer, the last one stays."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): answer for name, answer in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Charges:
    """Stands for the byte budget of a request."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self._limit = limit
        self.total = 0

    def __call__(self, count: int) -> None:
        if self.total + count > self._limit:
            raise Overloaded("full")
        self.total += count


class MediaServer:
    """A real server on loopback that remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[web.BaseRequest] = []
        self.routes: dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {}
        self.port = 0
        self.closed_early = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def answer(
        self,
        path: str,
        body: bytes = PIXELS,
        *,
        status: int = 200,
        content_type: str | None = "image/png",
        **headers: str,
    ) -> None:
        async def respond(_: web.BaseRequest) -> web.Response:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            if content_type is not None:
                sent["content-type"] = content_type
            return web.Response(status=status, body=body, headers=sent)

        self.routes[path] = respond

    def redirect(self, path: str, location: str, *, status: int = 302, **headers: str) -> None:
        self.answer(path, b"", status=status, content_type=None, location=location, **headers)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        route = self.routes.get(request.path)
        return await route(request) if route else web.Response(status=404)


@asynccontextmanager
async def serving(server: MediaServer, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[MediaServer]:
    runner = web.ServerRunner(web.Server(server.handle, handler_cancellation=True), shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[MediaServer]:
    async with serving(MediaServer()) as server:
        yield server


@pytest.fixture
async def fetcher() -> AsyncIterator[Callable[..., MediaFetcher]]:
    made: list[MediaFetcher] = []

    def make(policy: Any = None, **options: Any) -> MediaFetcher:
        defaults: dict[str, Any] = {
            "download_timeout": 20.0,
            "max_download_size": MAX_SIZE,
            "user_agent": "epd-sidecar/1.2.3",
            "look_up": Names(cdn_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]]),
        }
        made.append(MediaFetcher(policy or OnlyAddress("127.0.0.1"), **(defaults | options)))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@asynccontextmanager
async def raw_server(*parts: bytes, hold: bool = False, reset: bool = False) -> AsyncIterator[str]:
    """Answers every request with exactly these bytes, then closes, resets or holds the connection."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
        await writer.drain()
        if hold:
            await done.wait()
        if reset:
            writer.transport.abort()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/x.png"
    finally:
        done.set()
        listener.close()


def head(*fields: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", "content-type: image/png", *fields, "", ""]).encode()


async def refused(fetcher: MediaFetcher, url: str, says: str) -> str:
    with pytest.raises(BadRequest) as caught:
        await fetcher.fetch(url, IMAGES, Charges())
    assert caught.value.stage == "media"
    assert says in caught.value.message
    return caught.value.message


async def test_downloads(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """The bytes come back with their bare media type, and every one of them was charged once."""
    server.answer("/a.png", content_type="Image/PNG; charset=binary")
    charges = Charges()
    media = await fetcher().fetch(f"{server.url}/a.png?sig=a%2Fb+%7e", IMAGES, charges)
    assert (media.content_type, bytes(media.data)) == ("image/png", PIXELS)
    assert charges.total == len(PIXELS)
    assert server.requests[0].raw_path == "/a.png?sig=a%2Fb+%7e"


@pytest.mark.parametrize("target", ["/a%2fb/../c%7E?x=%2F+%7e&y='()|", "/50%", "/a//b", "/?", "/x?a=b?c"])
async def test_signed_urls_stay_as_written(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], target: str
) -> None:
    """Path and query reach the server byte for byte, first and behind a redirect."""
    server.redirect("/redirect", f"http://CDN.example:{server.port}{target}")
    for url in (f"{server.url}{target}", f"{server.url}/redirect"):
        with pytest.raises(StepRejected):
            await fetcher().fetch(url, IMAGES, Charges())
        assert server.requests[-1].raw_path.removesuffix("?") == target.removesuffix("?")


async def test_unescaped_urls_are_escaped(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """What may not stand in a request line is escaped, so no URL can add a header."""
    with pytest.raises(StepRejected):
        await fetcher().fetch(f"{server.url}/a b/é?x= \u00a0", IMAGES, Charges())
    assert server.requests[-1].raw_path == "/a%20b/%C3%A9?x=+%C2%A0"
    with pytest.raises(StepRejected):
        await fetcher().fetch(f"{server.url}/a\r\nx-evil: 1\r\n", IMAGES, Charges())
    assert "x-evil" not in server.requests[-1].headers


async def test_sends_nothing_of_the_client(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A media server sees who we are and what we take: no cookies, no credentials, no proxy in between."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.redirect("/a", "/b", set_cookie="session=1; Path=/")
    server.answer("/b")
    await fetcher().fetch(f"{server.url}/a", IMAGES, Charges())
    for request in server.requests:
        assert {name.lower(): value for name, value in request.headers.items()} == {
            "host": f"127.0.0.1:{server.port}",
            "user-agent": "epd-sidecar/1.2.3",
            "accept": "image/jpeg, image/png, */*;q=0.1",
            "accept-encoding": "identity",
        }


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_follows_redirects(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], status: int
) -> None:
    """Relative and absolute locations are followed to another host."""
    server.redirect("/dir/a", "../b", status=status)
    server.redirect("/b", f"http://cdn.example:{server.port}/c", status=status)
    server.answer("/c")
    media = await fetcher().fetch(f"{server.url}/dir/a", IMAGES, Charges())
    assert bytes(media.data) == PIXELS
    assert server.paths == ["/dir/a", "/b", "/c"]
    assert server.requests[-1].host == f"cdn.example:{server.port}"


async def test_five_redirects_are_the_most(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """Five redirects arrive, a sixth is refused without being asked for."""
    for hop in range(6):
        server.redirect(f"/{hop}", f"/{hop + 1}")
    server.answer("/6")
    media = await fetcher().fetch(f"{server.url}/1", IMAGES, Charges())
    assert bytes(media.data) == PIXELS
    server.requests.clear()
    await refused(fetcher(), f"{server.url}/0", "more than 5 redirects")
    assert server.paths == ["/0", "/1", "/2", "/3", "/4", "/5"]


async def test_redirect_loop(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """A loop ends like any chain that is too long."""
    server.redirect("/a", "/a")
    await refused(fetcher(), f"{server.url}/a", "more than 5 redirects")
    assert len(server.requests) == 6


async def test_redirect_without_location(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """A redirect to nowhere is the media server's fault."""
    server.answer("/a", status=302)
    with pytest.raises(StepFailed, match="without a location") as caught:
        await fetcher().fetch(f"{server.url}/a", IMAGES, Charges())
    assert (caught.value.status, caught.value.stage) == (502, "media")


BLOCKED_HOSTS = [
    "127.0.0.2",
    "169.254.169.254",
    "0.0.0.0",
    "100.64.0.1",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[fd00:ec2::254]",
    "[fe80::1]",
]


@pytest.mark.parametrize("host", BLOCKED_HOSTS)
async def test_blocked_literals(server: MediaServer, fetcher: Callable[..., MediaFetcher], host: str) -> None:
    """An address literal is judged although no resolver sees it, in the first URL and behind a redirect."""
    server.redirect("/a", f"http://{host}:{server.port}/secret")
    await refused(fetcher(), f"http://{host}:{server.port}/secret", "is blocked")
    await refused(fetcher(), f"{server.url}/a", "is blocked")
    assert server.paths == ["/a"]


@pytest.mark.parametrize(
    "host",
    [
        "2130706434",
        "0x7f000002",
        "0x7f.0.0.2",
        "0177.0.0.2",
        "127.2",
        "127.0.0.2.",
        "127。0。0。2",
        "①②⑦.0.0.2",
        "%31%32%37.0.0.2",
        "cdn.example@127.0.0.2",
        "127.0.0.1%00.cdn.example",
        "[fe80::1%25lo]",
        "[::ffff:127.0.0.1%25lo]",
    ],
)
async def test_odd_spellings_of_addresses(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], host: str
) -> None:
    """However a blocked address is written, nothing is asked for there."""
    server.redirect("/a", f"http://{host}:{server.port}/secret")
    client = fetcher(look_up=None)
    await refused(client, f"http://{host}:{server.port}/secret", "")
    await refused(client, f"{server.url}/a", "")
    assert server.paths == ["/a"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "0x7f.1"])
async def test_names_of_loopback(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], host: str
) -> None:
    """What the system's own resolver makes of a name is judged like any address."""
    client = fetcher(AddressPolicy(allow_private_networks=True), look_up=None)
    await refused(client, f"http://{host}:{server.port}/a", "is blocked: it is a loopback address")
    assert server.paths == []


async def test_real_policy_never_reaches_loopback(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """No configuration opens loopback, by literal or by name."""
    server.answer("/a")
    client = fetcher(AddressPolicy(allow_private_networks=True))
    await refused(client, f"{server.url}/a", "is blocked: it is a loopback address")
    await refused(client, f"http://cdn.example:{server.port}/a", "is blocked: it is a loopback address")
    assert server.paths == []


async def test_rebinding_name(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """A name that turns to a blocked address after its first look-up is caught at the second connection."""
    async with serving(MediaServer(), "127.0.0.2", server.port) as secret:
        server.redirect("/a", f"http://evil.example:{server.port}/secret", connection="close")
        secret.answer("/secret")
        names = Names(evil_example=[["127.0.0.1"], ["127.0.0.2"]])
        await refused(fetcher(look_up=names), f"http://evil.example:{server.port}/a", "is blocked")
        assert names.asked == ["evil.example", "evil.example"]
        assert (server.paths, secret.paths) == (["/a"], [])


async def test_the_address_judged_is_the_address_connected_to(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """One connection takes one look-up, and exactly its answer is judged when the socket opens."""
    server.answer("/a")
    names = Names(evil_example=[["127.0.0.1"], ["127.0.0.2"]])
    policy = OnlyAddress("127.0.0.1")
    media = await fetcher(policy, look_up=names).fetch(
        f"http://evil.example:{server.port}/a", IMAGES, Charges()
    )
    assert bytes(media.data) == PIXELS
    assert names.asked == ["evil.example"]
    assert policy.judged == ["127.0.0.1", "127.0.0.1"]


async def test_the_socket_is_guarded_on_its_own(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """A verdict that turns between look-up and connect counts: the last word is at the socket."""

    class Turning:
        def __init__(self) -> None:
            self._verdicts = iter([None])

        def check(self, _: IPAddress) -> str | None:
            return next(self._verdicts, "a turned address")

    server.answer("/a")
    await refused(fetcher(Turning()), f"http://cdn.example:{server.port}/a", "it is a turned address")
    assert server.paths == []


async def test_blocked_addresses_of_a_name_are_left_out(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """Of several addresses only those that pass are connected to; none left is an error."""
    async with serving(MediaServer(), "127.0.0.2", server.port) as secret:
        server.answer("/a")
        names = Names(
            mixed_example=[["127.0.0.2", "fd00::1", "127.0.0.1"]], bad_example=[["127.0.0.2", "fd00::1"]]
        )
        client = fetcher(look_up=names)
        media = await client.fetch(f"http://mixed.example:{server.port}/a", IMAGES, Charges())
        assert bytes(media.data) == PIXELS
        await refused(client, f"http://bad.example:{server.port}/a", "is blocked")
        assert secret.paths == []


async def test_unreadable_answers_of_a_resolver(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """An address that cannot be read is blocked; no addresses are a name that does not resolve."""
    names = Names(odd_example=[["0x7f000002"]], none_example=[[]])
    client = fetcher(look_up=names)
    await refused(client, f"http://odd.example:{server.port}/a", "not a canonical IP address")
    await refused(client, f"http://none.example:{server.port}/a", "does not resolve")


async def test_pooled_connection_stays_with_its_peer(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """A kept connection is used again without a look-up: its address was judged when it opened."""
    server.answer("/a")
    names = Names(evil_example=[["127.0.0.1"], ["127.0.0.2"]])
    client = fetcher(look_up=names)
    for _ in range(3):
        await client.fetch(f"http://evil.example:{server.port}/a", IMAGES, Charges())
    assert names.asked == ["evil.example"]
    assert len({request.transport for request in server.requests}) == 1


@pytest.mark.parametrize(
    "domain",
    ["cdn.example", "CDN.Example", "cdn.example.", "127.0.0.1", "bücher.example", "xn--bcher-kva.example"],
)
async def test_allowed_domains(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], domain: str
) -> None:
    """A listed host is matched in any capitalisation, IDNA form, and with a final dot."""
    server.answer("/a")
    names = Names(cdn_example=[["127.0.0.1"]])
    names._answers |= {"xn--bcher-kva.example": [["127.0.0.1"]], "cdn.example.": [["127.0.0.1"]]}
    client = fetcher(allowed_domains=[domain], look_up=names)
    spellings = {"b": ["BÜCHER.example"], "x": ["bücher.example"], "1": ["127.0.0.1"]}
    for host in spellings.get(domain[0], ["cdn.example", "CDN.EXAMPLE", "cdn.example."]):
        media = await client.fetch(f"http://{host}:{server.port}/a", IMAGES, Charges())
        assert bytes(media.data) == PIXELS


async def test_allowed_domains_hold_on_every_hop(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """A host that is not listed is refused, first and behind a redirect; a subdomain is another host."""
    server.redirect("/a", f"http://other.example:{server.port}/b")
    server.answer("/b")
    client = fetcher(allowed_domains=["cdn.example"])
    for host in ("other.example", "sub.cdn.example", "example", "127.0.0.1"):
        await refused(client, f"http://{host}:{server.port}/b", "allowed_domains")
    await refused(client, f"http://cdn.example:{server.port}/a", "other.example is not in allowed_domains")
    assert server.paths == ["/a"]


async def test_allowed_domains_do_not_open_addresses(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """A listed host is still judged by its address."""
    client = fetcher(AddressPolicy(), allowed_domains=["cdn.example"])
    await refused(client, f"http://cdn.example:{server.port}/b", "is blocked")


@pytest.mark.parametrize(
    "domain", ["*.example.com", "http://cdn.example", "cdn.example:80", "cdn.example/x", ""]
)
async def test_allowed_domains_are_checked(fetcher: Callable[..., MediaFetcher], domain: str) -> None:
    """What cannot match any host is a configuration error that names the key and the value."""
    with pytest.raises(ValueError, match="allowed_domains") as caught:
        fetcher(allowed_domains=[domain])
    assert repr(domain) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "must start with"),
        ("a.png", "must start with"),
        ("//cdn.example/a.png", "must start with"),
        ("ftp://cdn.example/a", "must start with"),
        ("file:///etc/passwd", "must start with"),
        ("http:///a.png", "no host"),
        ("http://", "no host"),
        ("https://?q", "no host"),
        ("http://[::1", "not valid"),
        ("http://cdn.example:99999/", "not valid"),
        ("http://a\\@cdn.example/", "not valid"),
        ("http://cdn example/", "invalid host"),
        ("http://-/", "invalid host"),
        ("http://xn--a/", "invalid host"),
        ("http://cdn.xn--x.example/", "invalid host"),
        ("http://user:secret@cdn.example/a", "credentials"),
        ("http://user@cdn.example/a", "credentials"),
        ("http://cdn.example/" + "a" * 20_000, "longer than 16384"),
        ("http://nowhere.example/a?token=secret", "nowhere.example does not resolve"),
        ("http://" + "a" * 64 + ".example/a", "does not resolve"),
    ],
)
async def test_bad_urls(fetcher: Callable[..., MediaFetcher], url: str, says: str) -> None:
    """A URL that cannot be asked for is a 400 that says what is wrong, without secrets."""
    message = await refused(fetcher(), url, says)
    assert "secret" not in message


async def test_urls_are_checked_ahead(fetcher: Callable[..., MediaFetcher]) -> None:
    """What the URL alone rules out is refused without a look-up; the address is left to the fetch."""
    names = Names()
    client = fetcher(allowed_domains=["cdn.example", "127.0.0.2"], look_up=names)
    client.check_url("https://cdn.example/a")
    client.check_url("http://127.0.0.2/a")
    for url in ("ftp://cdn.example/a", "https://other.example/a", "https://user@cdn.example/a"):
        with pytest.raises(BadRequest):
            client.check_url(url)
    assert names.asked == []


@pytest.mark.parametrize(
    "location",
    ["ftp://cdn.example/a", "file:///etc/passwd", "data:image/png;base64,QQ==", "http://["],
)
async def test_bad_redirects(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], location: str
) -> None:
    """Only http and https are followed."""
    server.redirect("/a", location)
    await refused(fetcher(), f"{server.url}/a", "media URL")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 429])
async def test_client_errors_keep_their_status(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], status: int
) -> None:
    """A 4xx of the media server is the client's to see."""
    server.answer("/a", status=status)
    with pytest.raises(
        StepRejected, match=f"media rejected the request: HTTP {status} from 127.0.0.1"
    ) as caught:
        await fetcher().fetch(f"{server.url}/a?token=secret", IMAGES, Charges())
    assert (caught.value.status, caught.value.code) == (status, "epd_media_rejected")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("status", [206, 304, 500, 503])
async def test_other_statuses_are_failures(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], status: int
) -> None:
    """A 5xx, and an answer that is not the media, is a 502."""
    server.answer("/a", status=status)
    with pytest.raises(StepFailed, match=f"HTTP {status}") as caught:
        await fetcher().fetch(f"{server.url}/a", IMAGES, Charges())
    assert (caught.value.status, caught.value.code) == (502, "epd_media_failed")


async def test_nobody_listens(fetcher: Callable[..., MediaFetcher]) -> None:
    """A refused connection is a 502, also through several addresses."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for host in ("127.0.0.1", "cdn.example"):
            with pytest.raises(StepFailed, match=f"media server {host} failed") as caught:
                await fetcher().fetch(f"http://{host}:{port}/a?token=secret", IMAGES, Charges())
            assert "secret" not in caught.value.message + caught.value.detail


async def test_tls_failure(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """A server that does not speak TLS where https is asked for is a 502."""
    with pytest.raises(StepFailed):
        await fetcher().fetch(f"https://127.0.0.1:{server.port}/a", IMAGES, Charges())


@pytest.mark.parametrize(
    ("content_type", "says"),
    [
        ("text/html; charset=utf-8", "has type 'text/html'; allowed here: image/jpeg, image/png"),
        ("image/svg+xml", "'image/svg+xml'"),
        ("x" * 5000, "allowed here"),
        ("imagé/png", "allowed here"),
        ("", "no content-type"),
        (" ; a=b", "no content-type"),
    ],
)
async def test_content_type(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], content_type: str, says: str
) -> None:
    """The header alone decides the type; what is not allowed is named with what is, briefly."""
    server.answer("/a", content_type=content_type)
    message = await refused(fetcher(), f"{server.url}/a", says)
    assert len(message) < 200
    assert message.isascii()


async def test_missing_content_type(fetcher: Callable[..., MediaFetcher]) -> None:
    """An answer without a type is refused, not guessed."""
    async with raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd") as url:
        await refused(fetcher(), url, "no content-type")


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "GZIP", "identity, gzip", "unknown"])
async def test_content_encoding(
    server: MediaServer, fetcher: Callable[..., MediaFetcher], encoding: str
) -> None:
    """An encoded answer is refused rather than inflated past the cap, in any encoding."""
    server.answer("/a", gzip.compress(PIXELS), content_encoding=encoding)
    await refused(fetcher(), f"{server.url}/a", f"content-encoding '{encoding.lower()}'")


async def test_content_encoding_identity(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """An answer that says it is not encoded is taken."""
    server.answer("/b", content_encoding="identity")
    media = await fetcher().fetch(f"{server.url}/b", IMAGES, Charges())
    assert bytes(media.data) == PIXELS


@pytest.mark.parametrize(
    "parts",
    [
        (b"content-length: 0\r\n\r\n",),
        (b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",),
        (b"connection: close\r\n\r\n",),
    ],
)
async def test_empty(fetcher: Callable[..., MediaFetcher], parts: tuple[bytes, ...]) -> None:
    """No bytes are no media, however the body is framed."""
    async with raw_server(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n", *parts) as url:
        await refused(fetcher(), url, "is empty")


async def test_announced_size_over_the_cap(fetcher: Callable[..., MediaFetcher]) -> None:
    """A content-length over the cap is refused before a byte is charged or read."""
    charges = Charges()
    async with raw_server(head(f"content-length: {MAX_SIZE + 1}"), hold=True) as url:
        with pytest.raises(BadRequest, match=r"larger than 0.0625 MB \(max_download_size"):
            await fetcher().fetch(url, IMAGES, charges)
    assert charges.total == 0


async def test_size_at_the_cap(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """The cap itself is allowed, one byte more is not."""
    server.answer("/fits", bytes(MAX_SIZE))
    server.answer("/over", bytes(MAX_SIZE + 1))
    media = await fetcher().fetch(f"{server.url}/fits", IMAGES, Charges())
    assert len(media.data) == MAX_SIZE
    await refused(fetcher(), f"{server.url}/over", "max_download_size")


async def endless(server: MediaServer, request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "image/png"})
    await response.prepare(request)
    try:
        while True:
            await response.write(bytes(CHUNK))
    finally:
        server.closed_early.set()


async def test_endless_body(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """A body without a length is counted while it arrives, and dropped at the cap with its connection."""
    server.routes["/a"] = lambda request: endless(server, request)
    charges = Charges(limit=16 << 20)
    with pytest.raises(BadRequest, match="max_download_size"):
        await fetcher(max_download_size=1 << 20).fetch(f"{server.url}/a", IMAGES, charges)
    assert 0 < charges.total <= 1 << 20
    await asyncio.wait_for(server.closed_early.wait(), 10)


async def test_budget_is_asked_first(server: MediaServer, fetcher: Callable[..., MediaFetcher]) -> None:
    """A full budget ends the fetch, whether the length is announced or not."""
    server.answer("/a", bytes(MAX_SIZE))
    server.routes["/b"] = lambda request: endless(server, request)
    for path in ("/a", "/b"):
        with pytest.raises(Overloaded):
            await fetcher(max_download_size=1 << 20).fetch(
                f"{server.url}{path}", IMAGES, Charges(limit=CHUNK - 1)
            )


@pytest.mark.parametrize(
    "answer",
    [
        head("content-length: 100") + b"short",
        head("content-length: 100"),
        head("transfer-encoding: chunked") + b"5\r\nshort\r\n",
        head("transfer-encoding: chunked") + b"zz\r\nshort\r\n",
        head("content-length: abc") + b"short",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"",
    ],
)
@pytest.mark.parametrize("reset", [False, True])
async def test_broken_answers(fetcher: Callable[..., MediaFetcher], answer: bytes, reset: bool) -> None:
    """A body cut short, a broken frame or no HTTP at all is a 502, never half the media."""
    async with raw_server(answer, reset=reset) as url:
        with pytest.raises(StepFailed, match=r"media server 127\.0\.0\.1 failed") as caught:
            await fetcher().fetch(f"{url}?token=secret", IMAGES, Charges())
    assert "secret" not in caught.value.detail


async def test_more_than_announced(fetcher: Callable[..., MediaFetcher]) -> None:
    """Bytes beyond the announced length are not part of the media and not of the next answer."""
    async with raw_server(
        head("content-length: 4") + b"goodHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    ) as url:
        client = fetcher()
        for _ in range(2):
            media = await client.fetch(url, IMAGES, Charges())
            assert bytes(media.data) == b"good"


@pytest.mark.parametrize("parts", [(), (head("content-length: 100"), b"slow")])
async def test_slow_server(fetcher: Callable[..., MediaFetcher], parts: tuple[bytes, ...]) -> None:
    """A server that stalls before or inside its answer runs into download_timeout."""
    async with raw_server(*parts, hold=True) as url:
        with pytest.raises(
            StepTimeout, match=r"127\.0\.0\.1 did not arrive within download_timeout \(0\.05 s\)"
        ) as caught:
            await fetcher(download_timeout=0.05).fetch(url, IMAGES, Charges())
    assert (caught.value.status, caught.value.code) == (504, "epd_media_timeout")


async def test_timeout_covers_the_whole_fetch(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """Name look-ups and redirects count too: each may be quick, their sum may not exceed the timeout."""

    async def crawl(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response(status=302, headers={"location": f"/a?{len(request.query_string)}"})

    async def never(_: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    server.routes["/a"] = crawl
    with pytest.raises(StepTimeout):
        await fetcher(download_timeout=0.3).fetch(f"{server.url}/a", IMAGES, Charges())
    with pytest.raises(StepTimeout):
        await fetcher(download_timeout=0.05, look_up=never).fetch("http://cdn.example/a", IMAGES, Charges())


async def test_cancellation_closes_the_connection(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """A cancelled fetch leaves no connection behind, and the fetcher goes on working."""
    started = asyncio.Event()

    async def stall(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "image/png"})
        await response.prepare(request)
        await response.write(b"x")
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.closed_early.set()
        return response

    server.routes["/a"] = stall
    server.answer("/b")
    client = fetcher(max_connections=1)
    task = asyncio.create_task(client.fetch(f"{server.url}/a", IMAGES, Charges()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.closed_early.wait(), 10)
    media = await client.fetch(f"{server.url}/b", IMAGES, Charges())
    assert bytes(media.data) == PIXELS


async def test_failed_fetches_give_their_connection_back(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """No way a fetch ends uses up the pool."""
    server.answer("/404", status=404)
    server.answer("/html", content_type="text/html")
    server.answer("/large", bytes(MAX_SIZE + 1))
    server.redirect("/ftp", "ftp://cdn.example/")
    server.answer("/ok")
    client = fetcher(max_connections=1, download_timeout=5.0)
    for path in ("/404", "/html", "/large", "/ftp") * 2:
        with pytest.raises((BadRequest, StepRejected)):
            await client.fetch(f"{server.url}{path}", IMAGES, Charges())
    media = await client.fetch(f"{server.url}/ok", IMAGES, Charges())
    assert bytes(media.data) == PIXELS


async def test_a_fetch_may_have_a_limit_of_its_own(
    server: MediaServer, fetcher: Callable[..., MediaFetcher]
) -> None:
    """The limit of one fetch replaces the fetcher's, in both directions."""
    server.answer("/media", bytes(MAX_SIZE + 1))
    media = await fetcher().fetch(f"{server.url}/media", IMAGES, Charges(), MAX_SIZE + 1)
    assert len(media.data) == MAX_SIZE + 1
    with pytest.raises(BadRequest, match="max_download_size"):
        await fetcher().fetch(f"{server.url}/media", IMAGES, Charges(), 1)
