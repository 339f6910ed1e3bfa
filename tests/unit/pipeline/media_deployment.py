"""The pipeline stand-in with replace-media-urls ahead, over downloads a test scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sidecar.config import MediaParams
from sidecar.pipeline.runner import TimedStep
from sidecar.pipeline.steps.media import MediaStep
from sidecar.upstream.addresses import AddressPolicy
from sidecar.upstream.media import Media, MediaFetcher
from tests.unit.pipeline.api_deployment import ApiDeployment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.pipeline.request import DecodeRewrite
    from sidecar.pipeline.runner import Pipeline


class ScriptedDownloads(MediaFetcher):
    """Downloads nothing: answers with the media type and bytes a test gives for each URL."""

    def __init__(self, media: Mapping[str, tuple[str, bytes]]) -> None:
        super().__init__(
            AddressPolicy(allow_private_networks=False),
            download_timeout=1,
            max_download_size=1 << 20,
            user_agent="test",
        )
        self.media = media
        self.fetched: list[str] = []

    async def fetch(
        self,
        url: str,
        allowed_types: frozenset[str],
        reserve: Callable[[int], None],
        max_size: int | None = None,  # noqa: ARG002 - nothing is downloaded
    ) -> Media:
        self.fetched.append(url)
        kind, data = self.media[url]
        assert kind in allowed_types
        reserve(len(data))
        return Media(kind, bytearray(data))


@dataclass
class MediaDeployment(ApiDeployment):
    """A deployment whose pipeline starts with replace-media-urls.

    Attributes:
        media: media type and bytes by URL.
    """

    media: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)

    def pipeline(self) -> Pipeline:
        pipeline = super().pipeline()
        self.downloads = ScriptedDownloads(self.media)
        ahead = TimedStep(MediaStep(MediaParams(), self.downloads), None)
        pipeline._steps = (ahead, *pipeline._steps)
        return pipeline

    async def run(self, body: Any) -> DecodeRewrite:
        try:
            return await super().run(body)
        finally:
            await self.downloads.close()
