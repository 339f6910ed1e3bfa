"""replace-media-urls: every media item of the request becomes a checked data URI."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sidecar.errors import BadRequest, SidecarError, StepName
from sidecar.jsontext import MalformedJson, read_string
from sidecar.multimodal.data_uri import (
    ALLOWED_TYPES,
    AUDIO_FORMATS,
    build_data_uri,
    check_base64,
    check_data_uri,
    is_data_uri,
    with_misspellings,
)
from sidecar.pipeline.fanout import gather_all

if TYPE_CHECKING:
    from sidecar.api import MediaPart
    from sidecar.config import MediaParams
    from sidecar.pipeline.state import RequestState
    from sidecar.upstream.media import MediaFetcher


class MediaStep:
    """Downloads http(s) media and checks inline media, in place.

    All checks that need no network come first: nothing is downloaded for a request that is refused anyway.
    The same URL is downloaded once.
    """

    name: StepName = "media"

    def __init__(self, params: MediaParams, fetcher: MediaFetcher) -> None:
        self._params = params
        self._fetcher = fetcher
        self._types = {
            modality: with_misspellings(params.content_types(modality) or types)
            for modality, types in ALLOWED_TYPES.items()
        }
        # Inline audio names a format instead of a media type.
        self._audio_formats = {name for name, kind in AUDIO_FORMATS.items() if kind in self._types["audio"]}

    async def run(self, state: RequestState) -> None:
        """Rewrite the media parts of the body; raises BadRequest or what the fetcher raises."""
        parts = state.body.parts
        limit = self._params.max_multimodal_entries
        if limit and len(parts) > limit:
            raise BadRequest(
                f"the request has {len(parts)} media items, the limit is {limit} (max_multimodal_entries)",
                stage=self.name,
            )
        remote: dict[tuple[str, str], list[MediaPart]] = {}
        for part in parts:
            try:
                url = self._check_inline(part)
                if url is not None:
                    self._fetcher.check_url(url)
                    remote.setdefault((part.modality, url), []).append(part)
            except BadRequest as error:
                raise _located(part, error) from None
        await self._download(state, remote)

    def _check_inline(self, part: MediaPart) -> str | None:
        """Check a part that holds its data; of any other, return the URL to download."""
        if part.inline_format is not None:
            allowed = self._audio_formats if part.modality == "audio" else self._types[part.modality]
            if part.inline_format not in allowed:
                raise BadRequest(
                    f"{part.modality} format {part.inline_format[:16]!a} is not allowed; "
                    f"allowed here: {', '.join(sorted(allowed))}"
                )
            part.set_url(check_base64(part.url))
            return None
        if is_data_uri(part.url):
            part.set_url(check_data_uri(part.url, self._types[part.modality]).text)
            return None
        try:
            return read_string(part.url)
        except MalformedJson:
            raise BadRequest("the media URL is not a valid JSON string") from None

    async def _download(self, state: RequestState, remote: dict[tuple[str, str], list[MediaPart]]) -> None:
        ticket = state.inbound.ticket

        async def download(modality: str, url: str, parts: list[MediaPart]) -> None:
            try:
                with state.inbound.stopwatch.waiting():
                    media = await self._fetcher.fetch(
                        url, self._types[modality], ticket.reserve, self._params.download_size(modality)
                    )
            except SidecarError as error:
                raise _located(parts[0], error) from None
            text = build_data_uri(media.content_type, media.data)
            # Held once, but sent on once per part.
            ticket.reserve(len(memoryview(text)) * len(parts))
            ticket.release(len(media.data))
            for part in parts:
                part.set_url(text)

        await gather_all(
            [partial(download, modality, url, parts) for (modality, url), parts in remote.items()],
            limit=self._params.max_concurrent_downloads,
        )


def _located(part: MediaPart, error: SidecarError) -> SidecarError:
    """The same error, its message led by the place of the part."""
    error.message = f"{part.location}: {error.message}"
    if isinstance(error, BadRequest):
        error.param = part.location
    return error
