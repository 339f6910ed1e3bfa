"""Whether engines count the prompt tokens that the renderer made (`observability.prompt_token_parity`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from sidecar.api import api_for_path
from sidecar.api.usage import reported_prompt_tokens
from sidecar.jsontext import MalformedJson, read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.observability.record import AccessRecord

logger = logging.getLogger(__name__)

Phase = Literal["prefill", "decode"]

_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What the access-log record says about a prompt the renderer made.

    Attributes:
        request_id: of the request.
        api: short name of the client's API.
        model: requested model, as long as the record has it.
        tokens: length of the prompt.
    """

    request_id: str
    api: str
    model: str
    tokens: int

    @classmethod
    def of(cls, record: Mapping[str, str]) -> Self | None:
        """From the record's strings; None when nothing was rendered: a client's own token ids are its own."""
        tokens = record.get("prompt_tokens", "")
        if not record.get("render_form") or not (tokens.isascii() and tokens.isdigit()):
            return None
        if len(tokens) > _MOST_DIGITS:
            return None
        return cls(record.get("request_id", ""), record.get("api", ""), record.get("model", ""), int(tokens))


class PromptTokenParity:
    """Says where an engine counted other prompt tokens than were rendered, and does nothing else.

    Args:
        on_comparison: called once per compared answer with its phase.
        on_mismatch: called once per mismatch with its phase.
    """

    def __init__(self, on_comparison: Callable[[Phase], None], on_mismatch: Callable[[Phase], None]) -> None:
        self._on_comparison = on_comparison
        self._on_mismatch = on_mismatch

    def prefill_answered(self, record: AccessRecord, path: str, body: bytes | bytearray) -> None:
        """Compare what prefill counted, where the prompt was rendered.

        Args:
            record: of the request.
            path: path of the call, which is the API of its answer.
            body: of the 200 answer.
        """
        prompt = RenderedPrompt.of(record.strings())
        api = api_for_path(path)
        if prompt is None or api is None:
            return
        try:
            reported = reported_prompt_tokens(api.name, read_object(body))
        except MalformedJson:
            return
        self.compare("prefill", prompt, reported)

    def compare(self, phase: Phase, prompt: RenderedPrompt, reported: int | None) -> None:
        """Warn when `reported` is another count than the rendered one; None is no count."""
        if reported is None:
            return
        self._on_comparison(phase)
        if reported == prompt.tokens:
            return
        logger.warning(
            "an engine counted other prompt tokens than were rendered",
            extra={
                "request_id": prompt.request_id,
                "phase": phase,
                "api": prompt.api,
                "model": prompt.model,
                "rendered": prompt.tokens,
                "reported": reported,
            },
        )
        self._on_mismatch(phase)
