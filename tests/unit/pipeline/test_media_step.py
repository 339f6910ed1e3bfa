from __future__ import annotations

import asyncio
import base64
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.api.chat import ChatApi
from sidecar.config import MediaParams
from sidecar.control_headers import ControlHeaders
from sidecar.errors import BadRequest, Overloaded, SidecarError, StepRejected
from sidecar.http import RequestHead
from sidecar.limits import InFlightBudget
from sidecar.observability.record import AccessRecord
from sidecar.observability.timing import Stopwatch
from sidecar.pipeline.request import DecodeRewrite, InboundRequest
from sidecar.pipeline.runner import LegRules, Pipeline, TimedStep
from sidecar.pipeline.steps.decode import DecodeStep
from sidecar.pipeline.steps.media import MediaStep
from sidecar.upstream.addresses import AddressPolicy
from sidecar.upstream.media import Media, MediaFetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PNG = b"\x89PNG" + bytes(range(200))


class Fetcher(MediaFetcher):
    """Downloads nothing: remembers what it is asked for and answers what the test says."""

    def __init__(self) -> None:
        super().__init__(
            AddressPolicy(allow_private_networks=False),
            download_timeout=1,
            max_download_size=1 << 20,
            user_agent="test",
        )
        self.fetched: list[str] = []
        self.limits: list[int | None] = []
        self.content_type = "image/png"
        self.error: SidecarError | None = None
        self.running = 0
        self.most = 0

    async def fetch(
        self,
        url: str,
        allowed_types: frozenset[str],
        reserve: Callable[[int], None],
        max_size: int | None = None,
    ) -> Media:
        assert self.error is not None or self.content_type in allowed_types
        self.fetched.append(url)
        self.limits.append(max_size)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            reserve(len(PNG))
            return Media(self.content_type, bytearray(PNG))
        finally:
            self.running -= 1


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    fetcher = Fetcher()
    yield fetcher
    await fetcher.close()


BUDGET = 1 << 20


async def run(
    fetcher: Fetcher, *parts: Any, budget: InFlightBudget | None = None, **params: Any
) -> list[Any]:
    """The parts as decode gets them."""
    step = MediaStep(MediaParams.model_validate(params), fetcher)
    body = {"messages": [{"role": "user", "content": list(parts)}]}
    budget = budget or InFlightBudget(1, BUDGET)
    with budget.admit() as ticket:
        rewrite = await Pipeline(
            [TimedStep(step, None), TimedStep(DecodeStep(None), None)], LegRules(ControlHeaders(), "", ())
        ).run(
            InboundRequest(
                head=RequestHead("POST", "/v1/chat/completions", "", ()),
                api=ChatApi(),
                body=json.dumps(body).encode(),
                request_id="r",
                traceparent="t",
                record=AccessRecord(),
                ticket=ticket,
                stopwatch=Stopwatch(),
                can_stream_answer=True,
                cleanup=ExitStack(),
            )
        )
        assert isinstance(rewrite, DecodeRewrite)
        content: list[Any] = json.loads(b"".join(rewrite.body))["messages"][0]["content"]
        return content


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def audio(data: str, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


REMOTE = "http://cdn.example/a.png"
DOWNLOADED = "data:image/png;base64," + base64.b64encode(PNG).decode()


async def test_remote_media_is_inlined_in_place(fetcher: Fetcher) -> None:
    """The URL becomes a data URI of the answer's type; nothing else of the part changes."""
    part = {"type": "image_url", "image_url": {"url": REMOTE, "detail": "low"}, "x": 1}
    text = {"type": "text", "text": REMOTE}
    bare = {"type": "input_image", "image_url": REMOTE}
    assert await run(fetcher, text, part, bare) == [
        text,
        {"type": "image_url", "image_url": {"url": DOWNLOADED, "detail": "low"}, "x": 1},
        {"type": "input_image", "image_url": DOWNLOADED},
    ]


async def test_the_same_url_is_downloaded_once(fetcher: Fetcher) -> None:
    """Equal URLs share one download, also when they are escaped differently."""
    content = await run(fetcher, image(REMOTE), image(REMOTE), image(REMOTE + "?b"))
    assert sorted(fetcher.fetched) == [REMOTE, REMOTE + "?b"]
    assert [part["image_url"]["url"] for part in content] == [DOWNLOADED] * 3


@pytest.mark.parametrize("limit", [1, 3])
async def test_downloads_are_bounded(fetcher: Fetcher, limit: int) -> None:
    """`max_concurrent_downloads` at a time, all of them made."""
    await run(fetcher, *(image(f"{REMOTE}?{i}") for i in range(8)), max_concurrent_downloads=limit)
    assert len(fetcher.fetched) == 8
    assert fetcher.most == limit


async def test_data_uris_stay_and_are_made_canonical(fetcher: Fetcher) -> None:
    """Inline media is checked, not downloaded."""
    content = await run(
        fetcher, image("data:image/png;base64,AAAA"), image("DATA:image/PNG;x=y;base64,AAAA"), audio("AAAA")
    )
    assert content == [image("data:image/png;base64,AAAA")] * 2 + [audio("AAAA")]
    assert fetcher.fetched == []


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (image("data:image/svg+xml;base64,AAAA"), "image/svg+xml"),
        (image("data:audio/wav;base64,AAAA"), "audio/wav"),
        (image("data:;base64,AAAA"), "media type"),
        (image("data:image/png,AAAA"), "base64"),
        (image("data:image/png;base64,A*AA"), "base64"),
        (image("data:image/png;base64,"), "empty"),
        (audio("A*AA"), "base64"),
        (audio("AAAA", "aac"), "aac"),
        (audio("AAAA", "wav;base64,X"), "format"),
        (image("ftp://cdn.example/a.png"), "http"),
        (image("file:///etc/passwd"), "http"),
        (image("/a.png"), "http"),
        (image("http://"), "host"),
        (image("http://user:pw@cdn.example/a.png"), "credentials"),
    ],
)
async def test_bad_media_is_refused_by_place_before_any_download(
    fetcher: Fetcher, part: dict[str, Any], named: str
) -> None:
    """A bad item is a 400 that names its place; the good ones next to it have not been fetched."""
    with pytest.raises(BadRequest) as refused:
        await run(fetcher, image(REMOTE), part, image(REMOTE + "?2"))
    assert refused.value.status == 400
    assert refused.value.message.startswith("messages[0].content[1]: ")
    assert named in refused.value.message
    assert fetcher.fetched == []


@pytest.mark.parametrize(("limit", "passes"), [(0, True), (3, True), (2, False)])
async def test_the_number_of_items_is_limited(fetcher: Fetcher, limit: int, *, passes: bool) -> None:
    """Over `max_multimodal_entries`: 400 with both numbers, nothing fetched; 0 is unlimited."""
    parts = (image(REMOTE), image("data:image/png;base64,AAAA"), audio("AAAA"))
    if passes:
        await run(fetcher, *parts, max_multimodal_entries=limit)
        return
    with pytest.raises(BadRequest, match=r"3 .*limit is 2 \(max_multimodal_entries\)"):
        await run(fetcher, *parts, max_multimodal_entries=limit)
    assert fetcher.fetched == []


async def test_a_failed_download_names_the_place(fetcher: Fetcher) -> None:
    """What the fetcher says is led by the part it is about, status and code unchanged."""
    fetcher.error = StepRejected("media", 404, "media rejected the request: HTTP 404 from cdn.example")
    with pytest.raises(StepRejected) as failed:
        await run(fetcher, {"type": "text", "text": "x"}, image(REMOTE))
    assert (failed.value.status, failed.value.code) == (404, "epd_media_rejected")
    assert failed.value.message == (
        "messages[0].content[1]: media rejected the request: HTTP 404 from cdn.example"
    )


async def test_the_data_uri_is_charged_and_the_download_given_back(fetcher: Fetcher) -> None:
    """A request is charged for the texts it holds and the download under way, afterwards for nothing."""
    text = len(DOWNLOADED) + len('""')
    parts = (image(REMOTE), image(REMOTE + "?2"))
    enough = InFlightBudget(1, text + len(PNG) + text)
    await run(fetcher, *parts, budget=enough, max_concurrent_downloads=1)
    assert enough.bytes == 0
    with pytest.raises(Overloaded):
        await run(
            fetcher,
            *parts,
            budget=InFlightBudget(1, text + len(PNG) + text - 1),
            max_concurrent_downloads=1,
        )


async def test_each_modality_has_its_own_download_size(fetcher: Fetcher) -> None:
    """A size for one modality replaces the common one; the others keep it."""
    await run(fetcher, image(REMOTE), max_download_size=1)
    fetcher.content_type = "video/mp4"
    video = {"type": "video_url", "video_url": {"url": REMOTE + ".mp4"}}
    await run(fetcher, video, max_download_size=1, max_video_download_size=50)
    assert fetcher.limits == [1 << 20, 50 << 20]


async def test_a_common_misspelling_is_what_it_means(fetcher: Fetcher) -> None:
    """`image/jpg` is allowed where `image/jpeg` is, and travels as it was sent."""
    jpg = image("data:image/jpg;base64,AAAA")
    await run(fetcher, jpg, allowed_image_content_types=["image/jpeg"])
    with pytest.raises(BadRequest) as caught:
        await run(fetcher, jpg, allowed_image_content_types=["image/png"])
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "params"),
    [
        (image("data:image/png;base64,AAAA"), {"allowed_image_content_types": ["image/webp"]}),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"allowed_audio_content_types": ["audio/flac"]},
        ),
    ],
)
async def test_an_allowlist_holds_for_inline_media(
    fetcher: Fetcher, part: dict[str, Any], params: dict[str, Any]
) -> None:
    """Types the deployment does not allow are refused, downloaded or inline."""
    with pytest.raises(BadRequest):
        await run(fetcher, part, **params)
    await run(fetcher, part)
