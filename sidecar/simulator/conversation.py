"""The turns of a client body, whichever API it speaks: text and media parts in prompt order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sidecar.simulator.errors import bad_request, invalid_field, unsupported_state
from sidecar.simulator.fields import JsonObject, required_list
from sidecar.simulator.media import MediaPart

if TYPE_CHECKING:
    from sidecar.simulator.tokens import Modality

ConversationApi = Literal["chat", "responses", "messages"]
Part = str | MediaPart

_URL_PARTS: dict[str, Modality] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_OPAQUE_PARTS = frozenset({"tool_use", "thinking"})
_STATEFUL = ("previous_response_id", "conversation")
_PROMPT_OPTIONS = ("tools", "chat_template_kwargs", "reasoning_effort", "reasoning")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: who speaks, and what in which order."""

    speaker: str
    parts: tuple[Part, ...]


def read_turns(api: ConversationApi, body: JsonObject) -> list[Turn]:
    """The turns of a body, led by one for tools and template options when the body sets any.

    Raises:
        ApiError: 400 for a missing or wrongly typed member, or a part type vLLM does not know.
    """
    options = {name: body[name] for name in _PROMPT_OPTIONS if body.get(name)}
    turns = [Turn("options", (msgspec.json.encode(options, order="sorted").decode(),))] if options else []
    match api:
        case "chat":
            turns += [_chat_turn(message) for message in required_list(body, "messages")]
        case "responses":
            turns += _responses_turns(body)
        case "messages":
            turns += _messages_turns(body)
    return turns


def _chat_turn(message: Any) -> Turn:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_field("messages", "each message is an object with a role")
    parts = _parts(message.get("content"), "messages")
    if calls := message.get("tool_calls"):
        parts.append(msgspec.json.encode(calls, order="sorted").decode())
    return Turn(message["role"], tuple(parts))


def _responses_turns(body: JsonObject) -> list[Turn]:
    for name in _STATEFUL:
        if body.get(name) is not None:
            raise unsupported_state(name)
    turns = []
    if instructions := body.get("instructions"):
        turns.append(Turn("system", tuple(_parts(instructions, "instructions"))))
    if isinstance(body.get("input"), str):
        return [*turns, Turn("user", (body["input"],))]
    for item in required_list(body, "input"):
        if not isinstance(item, dict):
            raise invalid_field("input", "each item is an object")
        match item.get("type", "message"):
            case "message":
                turns.append(Turn(str(item.get("role", "user")), tuple(_parts(item.get("content"), "input"))))
            case "function_call_output":
                turns.append(Turn("tool", tuple(_parts(item.get("output"), "input"))))
            case _:
                rest = msgspec.json.encode(item, order="sorted").decode()
                turns.append(Turn("assistant", (rest,)))
    return turns


def _messages_turns(body: JsonObject) -> list[Turn]:
    turns = []
    if system := body.get("system"):
        turns.append(Turn("system", tuple(_parts(system, "system"))))
    for message in required_list(body, "messages"):
        if not isinstance(message, dict) or str(message.get("role")) not in {"user", "assistant"}:
            raise invalid_field("messages", "each message is an object with the role user or assistant")
        content = message.get("content")
        results: list[Part] = []
        if isinstance(content, list):
            # Tool results become turns of their own, ahead of the turn that carries them.
            for block in content:
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    results += _parts(block.get("content"), "messages")
            content = [
                block
                for block in content
                if not (isinstance(block, dict) and block.get("type") == "tool_result")
            ]
        if results:
            turns.append(Turn("tool", tuple(results)))
        turns.append(Turn(message["role"], tuple(_parts(content, "messages"))))
    return turns


def _parts(content: Any, path: str) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid_field(path, "Input should be a valid string or list")
    return [_part(part, path) for part in content]


def _part(part: Any, path: str) -> Part:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid_field(path, "each content part is an object with a type")
    if kind in _TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise invalid_field(path, f"a {kind} part holds a string")
        return text
    if kind in _OPAQUE_PARTS:
        return msgspec.json.encode(part, order="sorted").decode()
    return _media_part(part, kind, path)


def _media_part(part: JsonObject, kind: str, path: str) -> MediaPart:
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise invalid_field(path, "uuid should be a valid string")
    if kind in _URL_PARTS:
        return MediaPart(_URL_PARTS[kind], _url(part.get(kind), path, kind), uuid)
    match kind:
        case "input_image":
            if path == "messages" and "detail" not in part:
                # Chat takes the part over from Responses, as a type that requires the member.
                raise bad_request("1 validation error for ResponseInputImageParam: detail: Field required")
            return MediaPart("image", _url(part.get("image_url"), path, kind), uuid)
        case "input_audio":
            return MediaPart("audio", _audio_url(part.get("input_audio"), path), uuid)
        case "image":
            return MediaPart("image", _source_url(part.get("source"), path), None)
        case "image_embeds":
            raise bad_request("You must set `--enable-mm-embeds` to input `image_embeds`", kind)
        case _:
            raise bad_request(f"Unsupported chat content part type: {kind!r}.", "type")


def _url(value: Any, path: str, kind: str) -> str | None:
    if isinstance(value, dict):
        value = value.get("url")
    if value is not None and not isinstance(value, str):
        raise invalid_field(path, f"the url of a {kind} part should be a valid string")
    return value


def _audio_url(value: Any, path: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("data"), str):
        raise invalid_field(path, "input_audio is an object with data and format")
    return f"data:audio/{value.get('format', 'wav')};base64,{value['data']}"


def _source_url(source: Any, path: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return f"data:{media_type};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
        case _:
            raise invalid_field(path, "an image block has a base64 or url source")
