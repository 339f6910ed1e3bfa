"""Speaking to a simulator the way the filter does, and the bodies for it."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from sidecar.simulator import Simulator
    from sidecar.simulator.config import Role

VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Caller:
    """Calls the roles of one simulator with the headers a correct filter sends."""

    def __init__(self, simulator: Simulator, session: aiohttp.ClientSession) -> None:
        self.simulator = simulator
        self.session = session

    async def post(self, role: Role, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """Status and JSON of one exchange."""
        async with self.send(role, path, body, **headers) as response:
            return response.status, await response.json()

    def send(self, role: Role, path: str, body: object, **headers: str) -> Any:
        """The exchange itself, for answers that are no JSON."""
        if role != "render":
            headers.setdefault("EPP-Profile", role)
        return self.session.post(self.simulator.url(role) + path, json=body, headers=headers)

    async def render(self, body: dict[str, Any]) -> dict[str, Any]:
        """The render answer to a chat body that must be accepted."""
        status, answer = await self.post("render", f"{CHAT}/render", body)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def encode(self, url: str, key: str, modality: str = "image") -> dict[str, Any]:
        """The descriptors of one item encoded in the content_parts form."""
        status, answer = await self.post("encode", GENERATE, encode_body(url, key, modality))
        assert status == 200, answer
        return answer["ec_transfer_params"] or {}

    @property
    def violations(self) -> list[str]:
        """Messages of all violations so far."""
        return [violation.message for violation in self.simulator.deployment.recorder.violations]

    @property
    def fatal(self) -> list[str]:
        """Messages of the violations that kill an engine."""
        return [item.message for item in self.simulator.deployment.recorder.violations if item.fatal]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something the simulator does on its own; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the simulator has no event to wait for
        await asyncio.sleep(0.01)


def image_url(width: int = 640, height: int = 480, colour: int = 0) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(buffer, "jpeg")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def audio_url(size: int = 4000) -> str:
    return "data:audio/wav;base64," + base64.b64encode(b"\x01" * size).decode()


def video_url(size: int = 70000) -> str:
    return "data:video/mp4;base64," + base64.b64encode(b"\x02" * size).decode()


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    """A chat body: one user turn with text and images, whose uuids may follow as `uuids`."""
    uuids = fields.pop("uuids", [None] * len(urls))
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    for url, uuid in zip(urls, uuids, strict=True):
        kind = url.removeprefix("data:").partition("/")[0] + "_url"
        part: dict[str, Any] = {"type": kind, kind: {"url": url}}
        parts.append(part | ({"uuid": uuid} if uuid else {}))
    return {"model": "simulated-vl", "messages": [{"role": "user", "content": parts}]} | fields


def encode_body(url: str, key: str | None, modality: str = "image") -> dict[str, Any]:
    pad = {"image": IMAGE_PAD, "video": 151656, "audio": 151646}[modality]
    part = {"type": f"{modality}_url", "url": url} | ({"uuid": key} if key else {})
    return {
        "model": "simulated-vl",
        "stream": False,
        "sampling_params": {"max_tokens": 1},
        "token_ids": [151644, pad],
        "content_parts": [part],
    }


def prefill_body(rendered: dict[str, Any], *, form: str, descriptors: dict[str, Any] | None = None) -> Any:
    """A features prefill body out of a render answer; `form` is `kwargs_data` or `mm_metadata`."""
    features = dict(rendered["features"])
    if form == "kwargs_data":
        features.pop("mm_metadata")
    else:
        features["kwargs_data"] = None
    body = {
        "model": "simulated-vl",
        "stream": False,
        "sampling_params": {"max_tokens": 1},
        "token_ids": rendered["token_ids"],
        "features": features,
        "kv_transfer_params": FOR_PREFILL,
    }
    return body | ({"ec_transfer_params": descriptors} if descriptors else {})


def decode_body(body: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """The decode body for a client body after prefill."""
    params = prefilled["kv_transfer_params"] or {}
    flags = {"do_remote_decode": False, "do_remote_prefill": True}
    return body | {"kv_transfer_params": params | flags}
