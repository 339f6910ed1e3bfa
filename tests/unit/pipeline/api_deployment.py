"""The pipeline stand-in for any client API."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sidecar.api.chat import ChatApi
from sidecar.pipeline.runner import Pipeline
from tests.unit.pipeline.pipeline_support import Deployment

if TYPE_CHECKING:
    from sidecar.api import Api
    from sidecar.pipeline.request import InboundRequest, PipelineResult


class _PipelineOfApi(Pipeline):
    """A pipeline that takes every request for one of `api`."""

    def __init__(self, pipeline: Pipeline, api: Api) -> None:
        super().__init__(
            pipeline._steps, pipeline._rules, mixed_spans_are_safe=pipeline._mixed_spans_are_safe
        )
        self._api = api

    async def run(self, inbound: InboundRequest) -> PipelineResult:
        head = replace(inbound.head, path=self._api.path)
        return await super().run(replace(inbound, head=head, api=self._api))


@dataclass
class ApiDeployment(Deployment):
    """A deployment whose client speaks `api`."""

    api: Api = field(default_factory=ChatApi)

    def pipeline(self) -> Pipeline:
        return _PipelineOfApi(super().pipeline(), self.api)
