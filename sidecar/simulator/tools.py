"""Tool choices at a deployment that was started without a tool parser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import bad_request

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Deployment
    from sidecar.simulator.fields import JsonObject
    from sidecar.simulator.prompt import Api

_ANTHROPIC_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def check_tool_choice(deployment: Deployment, api: Api, body: JsonObject) -> None:
    """Raise ApiError (400) for a chat or Messages body whose tool choice needs a parser that is missing.

    No choice means `auto`; `none` needs no parser.
    """
    if deployment.config.tool_parser or api not in {"chat", "messages"}:
        return
    choice = body.get("tool_choice") or "auto"
    if not body.get("tools") or choice in ("none", {"type": "none"}):
        return
    described = _described(api, choice)
    if described == '"auto"':
        raise bad_request(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    raise bad_request(f"tool_choice={described} requires --tool-call-parser to be set")


def _described(api: Api, choice: Any) -> str:
    if not isinstance(choice, dict):
        return f'"{choice}"'
    if api == "messages":
        kind = str(choice.get("type"))
        return f'function "{choice.get("name")}"' if kind == "tool" else f'"{_ANTHROPIC_CHOICES.get(kind)}"'
    function = choice.get("function")
    return f'function "{function.get("name") if isinstance(function, dict) else ""}"'
