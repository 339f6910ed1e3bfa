"""Recorded exchanges with a real vLLM: their requests to send again, their answers in a comparable form."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import struct
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack
from PIL import Image

DIRECTORY = Path(__file__).parents[2] / "recorded"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))

RECORDED_PLACEHOLDER, SIMULATED_PLACEHOLDER = 334, 151655
_MAX_MODEL_LEN = 8192
_BYTES_PER_PATCH = 1176

ACCEPTED = {
    r"error\.message": "wording",
    r"(response\.)?created(_at)?": "time of the answer",
    r"system_fingerprint": "names a build",
    r"choices\[\]\.(message|delta)\.content": "generated text",
    r"choices\[\]\.(text|token_ids|weight_versions)": "generated tokens; a simulated word is several tokens",
    r"content\[\]\.text|delta\.text|(part\.)?text|delta": "generated text",
    r"(response\.)?output\[\]\.content|item\.content": "generated text, which may be empty",
    r"sequence_number": "depends on the number of pieces the text comes in",
    r"features\.mm_placeholders\.image\[\]\.offset": "tokenizer and chat template",
    r"(response\.)?usage\.input_tokens_details\.(cached|cache_write)_tokens": "state of the recorded cache",
}
"""Paths in an answer whose values may differ, with the reason; their types may not."""

_PROMPT_COUNTS = r"(response\.|message\.)?usage\.(prompt|input|total)_tokens"
"""Lengths of prompts made from text: another tokenizer, another template."""

_PICTURE = re.compile(r"<picture (\w) (\d+)x(\d+) (png|jpeg)( base64)?>")
_TENSORS = re.compile(r"<tensors (\d+)x(\d+)x(\d+) of (\d+) characters>")
_REPEATED = re.compile(r"<(\d+) times: (.*)>", re.DOTALL)
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_MADE_UP_ID = re.compile(r"\b(resp_|msg_|chatcmpl-)[0-9a-f]{16,32}\b")


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    return document


def request_bytes(exchange: dict[str, Any]) -> bytes:
    """The body to send, its bulk made again and its placeholder tokens those of the simulator."""
    body = exchange["request"]["body"]
    return body.encode() if isinstance(body, str) else json.dumps(_made_again(body)).encode()


def _made_again(value: Any) -> Any:
    match value:
        case dict():
            return {name: _made_again(item) for name, item in value.items()}
        case list():
            return [_made_again(item) for item in value]
        case str():
            return _bulk(value)
        case int() if value == RECORDED_PLACEHOLDER and not isinstance(value, bool):
            return SIMULATED_PLACEHOLDER
        case _:
            return value


def _bulk(text: str) -> str:
    if match := _PICTURE.fullmatch(text):
        label, width, height, kind, bare = match.groups()
        data = picture(label, int(width), int(height), kind)
        return data if bare else f"data:image/{kind};base64,{data}"
    if match := _TENSORS.fullmatch(text):
        rows, columns = int(match[2]), int(match[3])
        return _tensors_item((int(match[1]), rows, columns))
    if match := _REPEATED.fullmatch(text):
        return match[2] * int(match[1])
    return text


def picture(label: str, width: int, height: int, kind: str) -> str:
    """The base64 of a picture of coloured blocks; equal arguments give equal bytes."""
    colours = random.Random(f"{label} {width}x{height}")  # noqa: S311 - colours, not secrets
    image = Image.new("RGB", (width, height))
    for left in range(0, width, 14):
        for top in range(0, height, 14):
            colour = (colours.randrange(256), colours.randrange(256), colours.randrange(256))
            image.paste(colour, (left, top, left + 14, top + 14))
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def _tensors_item(grid: tuple[int, int, int]) -> str:
    """An item as vLLM's own renderer lays it out: pixels per patch, and the grid."""
    patches = grid[0] * grid[1] * grid[2]
    pixels = msgpack.ExtType(3, bytes(patches * _BYTES_PER_PATCH))
    item = {
        "pixel_values": {
            "data": ["uint8", [patches, _BYTES_PER_PATCH], pixels],
            "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, patches, None]]], "dim": 0}],
        },
        "image_grid_thw": {
            "data": ["int64", [3], msgpack.ExtType(3, struct.pack("<3q", *grid))],
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return base64.b64encode(msgpack.packb(item)).decode()


def encoder_outputs(exchange: dict[str, Any]) -> list[dict[str, Any]]:
    """Encode bodies that produce what the request's `ec_transfer_params` announce."""
    body = exchange["request"]["body"]
    announced = body.get("ec_transfer_params") if exchange["role"] == "prefill" else None
    bodies = []
    for label, (key, descriptor) in zip("ab", (announced or {}).items(), strict=False):
        _, rows, columns = descriptor["metadata"]["image_grid_thw"]
        url = _bulk(f"<picture {label} {columns * 14}x{rows * 14} png>")
        bodies.append(
            {
                "model": body["model"],
                "sampling_params": {"max_tokens": 1},
                "token_ids": [1, SIMULATED_PLACEHOLDER],
                "content_parts": [{"type": "image_url", "url": url, "uuid": key}],
            }
        )
    return bodies


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, as the recordings hold them."""
    events = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        events.append({"event": lines.get("event"), "data": data if data == "[DONE]" else json.loads(data)})
    return events


class Comparable:
    """Brings an answer to a request into the form in which two answers must be equal.

    Accepted differences become type names; hashes and made-up ids are numbered and masked; the pieces of a
    streamed text count as one.
    """

    def __init__(self, exchange: dict[str, Any]) -> None:
        body = exchange["request"]["body"]
        given = isinstance(body, dict) and ("token_ids" in body or isinstance(body.get("prompt"), list))
        self._counts_prompt = given
        self._hashes: dict[str, int] = {}
        self._text(json.dumps(body))

    def document(self, answer: Any) -> Any:
        if isinstance(answer, list):
            return [self.document(item) for item in answer]
        answer = dict(answer)
        limit = answer.get("sampling_params", {}).get("max_tokens")
        if limit is not None and limit == _MAX_MODEL_LEN - len(answer["token_ids"]):
            answer["sampling_params"] = answer["sampling_params"] | {"max_tokens": "all that fits"}
        for name in ("token_ids", "prompt_token_ids"):
            if answer.get(name) is not None:
                answer[name] = self._tokens(answer[name])
        return self._value(answer, "")

    def events(self, events: list[dict[str, Any]]) -> list[Any]:
        shapes = [
            (event["event"], event["data"] if event["data"] == "[DONE]" else self.document(event["data"]))
            for event in events
        ]
        return [shape for shape, _ in groupby(shapes)]

    def _tokens(self, tokens: list[int]) -> Any:
        own = [RECORDED_PLACEHOLDER if token == SIMULATED_PLACEHOLDER else token for token in tokens]
        if self._counts_prompt:
            return own
        runs = [(token, len(list(run))) for token, run in groupby(own)]
        return {"placeholder runs": [length for token, length in runs if token == RECORDED_PLACEHOLDER]}

    def _value(self, value: Any, path: str) -> Any:
        if any(re.fullmatch(pattern, path) for pattern in ACCEPTED):
            return type(value).__name__
        if not self._counts_prompt and re.fullmatch(_PROMPT_COUNTS, path):
            return type(value).__name__
        match value:
            case dict():
                return {
                    self._text(name): self._value(item, f"{path}.{name}" if path else name)
                    for name, item in value.items()
                }
            case list():
                return [self._value(item, f"{path}[]") for item in value]
            case str():
                return self._text(_grid_of_tensors(value) if "kwargs_data" in path else value)
            case _:
                return value

    def _text(self, text: str) -> str:
        numbered = _HASH.sub(
            lambda match: f"<hash {self._hashes.setdefault(match[0], len(self._hashes))}>", text
        )
        return _MADE_UP_ID.sub(r"\1<made up>", numbered)


def _grid_of_tensors(item: str) -> str:
    """`tensors TxHxW`, of a recorded item or of one that holds as many bytes as vLLM's own."""
    if match := _TENSORS.fullmatch(item):
        return f"tensors {match[1]}x{match[2]}x{match[3]}"
    fields = msgpack.unpackb(base64.b64decode(item, validate=True))
    grid = struct.unpack("<3q", fields["image_grid_thw"]["data"][2].data)
    patches = grid[0] * grid[1] * grid[2]
    if len(fields["pixel_values"]["data"][2].data) != patches * _BYTES_PER_PATCH:
        return "tensors of another size"
    return f"tensors {grid[0]}x{grid[1]}x{grid[2]}"
