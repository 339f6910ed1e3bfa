"""The ext_proc service, as grpc.aio serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from sidecar.extproc.call import Call, Shared
from sidecar.extproc.companions import Companions
from sidecar.extproc.observation import Observation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.extproc.channel import Context
    from sidecar.extproc.rules import ServiceRules
    from sidecar.limits import InFlightBudget
    from sidecar.observability.record import AccessRecord
    from sidecar.pipeline.parity import PromptTokenParity
    from sidecar.pipeline.request import InboundRequest, PipelineResult

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"


class ExternalProcessor:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor/Process`.

    Args:
        rules: what the deployment says.
        run: the pipeline; raises SidecarError when the request fails. Cancelled when the client leaves or the
            deadline passes. The stream of an answer it returns is closed by its own `cleanup`.
        budget: what the process may hold at a time.
        on_answer: called once per answered request with its finished record.
        parity: compares the prompt tokens of the answers that an observing filter copies; None for not.
    """

    def __init__(
        self,
        rules: ServiceRules,
        run: Callable[[InboundRequest], Awaitable[PipelineResult]],
        budget: InFlightBudget,
        on_answer: Callable[[AccessRecord], None],
        parity: PromptTokenParity | None = None,
    ) -> None:
        self._companions = Companions()
        self._observation = Observation(parity, rules.metadata_namespace)
        self._shared = Shared(rules, run, budget, on_answer, self._companions, self._observation)
        self._calls: set[Call] = set()

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        """The handler to register with a grpc.aio server.

        Messages are left serialised: the call reads and writes them itself, and answers what it cannot read.
        """
        method = grpc.stream_stream_rpc_method_handler(self.process)
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": method})

    async def process(self, _requests: object, context: Context) -> None:
        """Serve one call, which is one HTTP request."""
        call = Call(self._shared, context)
        self._calls.add(call)
        try:
            await call.serve()
        finally:
            self._calls.discard(call)

    async def ended(self) -> None:
        """Wait for what has outlived its call."""
        await self._companions.ended()

    def end_observation(self) -> None:
        """End the calls nobody waits for, which last as long as the answers they copy."""
        self._observation.end()

    def shut_down_calls(self) -> None:
        """Answer all running calls with 503 and end what has outlived its call: the process will stop."""
        self.end_observation()
        for call in tuple(self._calls):
            call.shut_down()
        self._companions.cancel()
