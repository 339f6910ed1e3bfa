"""A whole pipeline over scripted upstreams: what each leg was sent, what came out for decode."""

from __future__ import annotations

import inspect
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sidecar.api.chat import ChatApi
from sidecar.config import EncodeParams, RenderParams
from sidecar.connectors.ec import ec_connector
from sidecar.connectors.kv import kv_connector
from sidecar.control_headers import ControlHeaders
from sidecar.http import RequestHead
from sidecar.limits import InFlightBudget
from sidecar.observability.record import AccessRecord
from sidecar.observability.timing import Stopwatch
from sidecar.pipeline.prefill_request import PrefillRequests
from sidecar.pipeline.request import DecodeRewrite, InboundRequest
from sidecar.pipeline.runner import LegRules, Pipeline, TimedStep
from sidecar.pipeline.steps.conditional_decode import ConditionalDecodeStep
from sidecar.pipeline.steps.decode import DecodeStep
from sidecar.pipeline.steps.encode import EncodeStep
from sidecar.pipeline.steps.prefill import PrefillStep
from sidecar.pipeline.steps.prefill_decode import PrefillDecodeStep
from sidecar.pipeline.steps.render import RenderStep
from sidecar.pipeline.tensor_memory import TensorMemory
from sidecar.upstream.client import Answer, Call, OpenAnswer, Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from sidecar.http import HeaderPairs
    from sidecar.pipeline.parity import PromptTokenParity
    from sidecar.pipeline.request import PipelineResult
    from sidecar.pipeline.runner import Step

REQUEST_ID = "req-1"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
FORWARDED = "x-llm-d-disagg-revision"
PHASE_TOKEN = "phase-secret"

PIXEL = "data:image/png;base64,AAAA"
HASHES = ("a" * 64, "b" * 64, "c" * 64)
TENSORS = ("dGVuc29yMA==", "dGVuc29yMQ==", "dGVuc29yMg==")

# Two images: four tokens at 2, two tokens at 7; 4 patches per token fit both grids.
TOKEN_IDS = [1, 10, 7, 7, 7, 7, 11, 8, 8, 12]
SPANS = ((2, 4), (7, 2))
GRIDS = ([1, 4, 4], [1, 2, 4])
MIXED_IDS = [1, 10, 7, 7, 9, 7, 11, 8, 8, 12]
"""The first image's span mixes tokens."""

METADATA = (
    "ga5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAABAAAAAAAAAAEAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGra2VlcF9vbl9jcHXD",
    "ga5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAAAgAAAAAAAAAEAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGra2VlcF9vbl9jcHXD",
)
"""Metadata items of the two grids, as an engine's renderer emits them."""


def image(name: str = "AAAA") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def chat(*parts: Any, **members: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **members}


def two_images(**members: Any) -> dict[str, Any]:
    return chat({"type": "text", "text": "compare"}, image("AAAA"), image("BBBB"), **members)


def rendered(token_ids: Sequence[int] = TOKEN_IDS, **features: Any) -> dict[str, Any]:
    """A render answer for two images; a feature given as `...` is left out."""
    members: dict[str, Any] = {
        "mm_hashes": {"image": list(HASHES[:2])},
        "mm_placeholders": {"image": [{"offset": o, "length": n} for o, n in SPANS]},
        "kwargs_data": {"image": list(TENSORS[:2])},
        "mm_metadata": None,
    } | features
    return {
        "request_id": "chatcmpl-x",
        "token_ids": list(token_ids),
        "features": {key: value for key, value in members.items() if value is not ...},
        "sampling_params": {"temperature": 0.5, "max_tokens": 77, "min_tokens": 3, "stop": []},
        "model": "m",
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def rendered_text(token_ids: Sequence[int] = (1, 2, 3)) -> dict[str, Any]:
    return rendered(token_ids) | {"features": None}


def descriptor(grid: Any = None, *, peer: bool = True, **members: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"item_indices": [0], "metadata": {}, **members}
    if grid is not None:
        value["metadata"] = {"image_grid_thw": grid}
    if peer:
        value |= {"peer_host": "10.0.0.1", "peer_port": 5610}
    return value


def answer(members: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    body = members if isinstance(members, bytes) else json.dumps(members, separators=(",", ":")).encode()
    return Answer(status, headers or {}, bytearray(body))


def sent(call: Call) -> Any:
    return json.loads(b"".join(call.body))


def item_of(call: Call) -> str:
    """Hash of the one media item of an encode call in any form, "" when it has none."""
    body = sent(call)
    if "messages" in body:
        return str(body["messages"][0]["content"][0].get("uuid", ""))
    if "content_parts" in body:
        return str(body["content_parts"][0]["uuid"])
    (hashes,) = body["features"]["mm_hashes"].values()
    return str(hashes[0])


class ScriptedAnswer(OpenAnswer):
    """An answer whose body the test wrote; `headers` may repeat a name."""

    def __init__(self, call: Call, scripted: Answer, headers: HeaderPairs) -> None:
        self.status = scripted.status
        self.headers = headers or tuple(scripted.headers.items())
        self.closed = False
        self._call = call
        self._scripted = scripted

    async def read(self) -> Answer:
        self._call.reserve(len(self._scripted.body))
        return self._scripted

    async def read_up_to(self, limit: int) -> Answer:
        return Answer(self.status, dict(self.headers), self._scripted.body[:limit])

    async def chunks(self) -> AsyncIterator[bytes]:
        yield bytes(self._scripted.body)

    def close(self) -> None:
        self.closed = True


class ScriptedUpstream(Upstream):
    """Stands in for the HTTP client: remembers the calls, answers what the test says."""

    def __init__(self, respond: Callable[[Call], Answer | Awaitable[Answer]]) -> None:
        super().__init__(
            "http://stand-in.test",
            head_timeout=1,
            timeout_key="timeout",
            address_key="address",
            max_idle=1,
            idle_timeout=1,
        )
        self.respond = respond
        self.calls: list[Call] = []
        self.opened: list[ScriptedAnswer] = []
        self.open_headers: HeaderPairs = ()

    async def open(self, call: Call) -> OpenAnswer:
        self.opened.append(ScriptedAnswer(call, await self.post(call), self.open_headers))
        return self.opened[-1]

    async def post(self, call: Call) -> Answer:
        self.calls.append(call)
        result = self.respond(call)
        return await result if inspect.isawaitable(result) else result


@dataclass
class Deployment:
    """Settings and upstreams of one pipeline; run it with `run`.

    Attributes:
        render: answer of the render service.
        descriptors: what the encoders answer, by hash.
        prefill: answer of prefill.
        openai: format of encode and prefill.
        probe: answer to the conditional decode request.
        both: answers reservation and prefill of prefill-decode.
        both_timeout: seconds for its prefill.
        can_stream: whether the filter can stream an answer.
        parity: compares prefill's prompt tokens, None for not.
    """

    render: Any = field(default_factory=rendered)
    descriptors: dict[str, Any] = field(default_factory=dict)
    prefill: Any = field(default_factory=lambda: {"kv_transfer_params": {"remote_host": "10.0.0.2"}})
    openai: bool = False
    mm_payload: str = "tensors"
    ec: str = "ec-nixl"
    trust_descriptors: bool = False
    kv: str = "kv-nixl"
    sparse_spans: str = "openai"
    max_parallel: int = 8
    on_failure: str = "fail"
    encode_timeout: str = "60s"
    tensor_memory: TensorMemory = field(default_factory=TensorMemory)
    max_total_tokens: int = 0
    max_total_placeholder_tokens: int = 0
    steps: tuple[str, ...] = ("render", "encode", "prefill", "decode")
    headers: HeaderPairs = ()
    strip: tuple[str, ...] = ()
    phase_token: str = ""
    record: AccessRecord = field(default_factory=AccessRecord)
    encode: Callable[[Call], Answer | Awaitable[Answer]] | None = None
    on_prefill: Callable[[Call], Answer | Awaitable[Answer]] | None = None
    probe: Answer = field(default_factory=lambda: answer({"error": "nobody"}, 412))
    both: Callable[[Call], Answer | Awaitable[Answer]] | None = None
    both_timeout: float = 60.0
    can_stream: bool = True
    parity: PromptTokenParity | None = None

    def __post_init__(self) -> None:
        self.cleanup = ExitStack()
        self.renderer = ScriptedUpstream(self._render)
        self.gateway = ScriptedUpstream(self._gateway)

    @property
    def encodes(self) -> list[Call]:
        return [call for call in self.gateway.calls if call.step == "encode"]

    @property
    def prefills(self) -> list[Call]:
        return [call for call in self.gateway.calls if call.step == "prefill"]

    @property
    def prefill_body(self) -> Any:
        (call,) = self.prefills
        return sent(call)

    def _render(self, call: Call) -> Answer:
        render = self.render(sent(call)) if callable(self.render) else self.render
        return render if isinstance(render, Answer) else answer(render)

    def _gateway(self, call: Call) -> Answer | Awaitable[Answer]:
        if call.step == "conditional_decode":
            return self.probe
        if call.step == "prefill_decode" and self.both is not None:
            return self.both(call)
        if call.step == "prefill":
            if self.on_prefill is not None:
                return self.on_prefill(call)
            return self.prefill if isinstance(self.prefill, Answer) else answer(self.prefill)
        if self.encode is not None:
            return self.encode(call)
        found = self.descriptors.get(item_of(call))
        return answer(
            {"choices": [], "ec_transfer_params": None if found is None else {item_of(call): found}}
        )

    def pipeline(self) -> Pipeline:
        ec = ec_connector(self.ec, trust_descriptors=self.trust_descriptors)
        kv = kv_connector(self.kv)
        render = RenderParams.model_validate(
            {
                "address": "http://render.test",
                "mm_payload": self.mm_payload,
                "max_total_tokens": self.max_total_tokens,
                "max_total_placeholder_tokens": self.max_total_placeholder_tokens,
            }
        )
        encode = EncodeParams.model_validate(
            {
                "max_parallel": self.max_parallel,
                "use_openai_format": self.openai,
                "on_failure": self.on_failure,
                "timeout": self.encode_timeout,
            }
        )
        requests = PrefillRequests(self.openai, self.sparse_spans == "verbatim", ec)
        steps: dict[str, Step] = {
            "render": RenderStep(render, self.renderer, tokens_in=not self.openai, memory=self.tensor_memory),
            "conditional-decode": ConditionalDecodeStep(self.gateway),
            "encode": EncodeStep(encode, self.gateway),
            "prefill": PrefillStep(requests, self.gateway, kv, self.parity),
            "prefill-decode": PrefillDecodeStep(
                requests, self.gateway, bootstrap_port=8998, timeout=self.both_timeout
            ),
            "decode": DecodeStep(kv if "prefill" in self.steps else None),
        }
        control = ControlHeaders({*self.strip, FORWARDED})
        return Pipeline(
            [TimedStep(steps[name], None) for name in self.steps],
            LegRules(control, self.phase_token, (FORWARDED,)),
            mixed_spans_are_safe=self.sparse_spans == "verbatim",
        )

    async def result(self, body: Any, budget: InFlightBudget | None = None) -> PipelineResult:
        """What the pipeline makes of a request."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        budget = budget or InFlightBudget(max_requests=1, max_bytes=1 << 30)
        with budget.admit() as ticket:
            return await self.pipeline().run(
                InboundRequest(
                    head=RequestHead("POST", "/v1/chat/completions", "", self.headers),
                    api=ChatApi(),
                    body=text,
                    request_id=REQUEST_ID,
                    traceparent=TRACEPARENT,
                    record=self.record,
                    ticket=ticket,
                    stopwatch=Stopwatch(),
                    can_stream_answer=self.can_stream,
                    cleanup=self.cleanup,
                )
            )

    async def run(self, body: Any) -> DecodeRewrite:
        """Run, and expect the decode rewrite."""
        result = await self.result(body)
        assert isinstance(result, DecodeRewrite)
        return result

    async def decode(self, body: Any) -> Any:
        """Run, and read the decode body."""
        return json.loads(b"".join((await self.run(body)).body))
