"""A request that an engine accepted, and the answer it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidecar.simulator.bootstrap import BOOTSTRAP_FIELDS, RANK_FIELDS, violate_fields
from sidecar.simulator.errors import internal_error
from sidecar.simulator.fields import MM_PAYLOADS, optional_bool, optional_choice, optional_object
from sidecar.simulator.generation import Answer, Generation
from sidecar.simulator.prompt import read_prompt
from sidecar.simulator.sampling import TRANSFER_FIELDS, read_sampling
from sidecar.simulator.tools import check_tool_choice

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.prompt import Api, Entry, Prompt
    from sidecar.simulator.sampling import Sampling

_RENDER_FIELDS = ("mm_payload", "return_mm_kwargs")
"""Fields that only ever belong in a render body."""


@dataclass(frozen=True, slots=True)
class Work:
    """One accepted request.

    Attributes:
        deployment: the deployment of the engine.
        call: the request.
        api: API of the body.
        request_id: id without the API's prefix.
        sampling: how much to generate.
        prompt: what to generate from.
    """

    deployment: Deployment
    call: Call
    api: Api
    request_id: str
    sampling: Sampling
    prompt: Prompt

    def answer(
        self,
        words: tuple[str, ...],
        finish_reason: str,
        *,
        cached_tokens: int = 0,
        kv_params: dict[str, Any] | None = None,
        ec_params: dict[str, Any] | None = None,
    ) -> Answer:
        """The answer with these words, one output token each."""
        generation = Generation(
            self.api,
            self.request_id,
            self.sampling.model,
            words,
            finish_reason,
            choices=self.sampling.choices,
            prompt_tokens=len(self.prompt.token_ids) + self._skew(),
            cached_tokens=cached_tokens,
            prompt_tokens_details=self.deployment.config.prompt_tokens_details,
            settings=self.call.body,
            prompt_echo=self._prompt_echo(),
            transfer={"kv_transfer_params": kv_params, "ec_transfer_params": ec_params},
        )
        return Answer(generation, self.sampling.stream, self.sampling.include_usage)

    def _skew(self) -> int:
        return self.deployment.config.prompt_token_skew.get(self.call.role, 0)

    def _prompt_echo(self) -> dict[str, Any]:
        if not optional_bool(self.call.body, "return_token_ids"):
            return {"prompt_token_ids": None, "mm_placeholders": None}
        spans = self.prompt.placeholders()
        return {"prompt_token_ids": self.prompt.token_ids, "mm_placeholders": spans or None}


def admit(deployment: Deployment, call: Call, api: Api, request_id: str) -> Work:
    """Read a request to an engine, and record fields that may not be where they are.

    Raises:
        ApiError: what vLLM answers to a body it refuses.
    """
    _violate_misplaced_fields(deployment, call)
    if api != "generate":
        optional_choice(call.body, "mm_payload", MM_PAYLOADS)
    sampling = read_sampling(deployment, api, call.body)
    check_tool_choice(deployment, api, call.body)
    return Work(deployment, call, api, request_id, sampling, read_prompt(deployment, call, api))


def check_span(work: Work, entry: Entry) -> None:
    """Raise ApiError (500) where the span of a features entry cannot take its embeddings."""
    if entry.source == "media":
        return
    name = f"{entry.modality} {entry.key!r}"
    recorder, exchange = work.deployment.recorder, work.call.exchange
    if len(set(work.prompt.token_ids[entry.offset : entry.offset + entry.length])) > 1:
        raise recorder.crash(
            exchange, f"{name}: the span mixes tokens, not all of its {entry.length} get an embedding"
        )
    if entry.embeds is None:
        if entry.source != "cached":
            raise internal_error("Internal server error: the item has no grid")
    elif entry.embeds != entry.length:
        raise recorder.crash(
            exchange, f"{name}: the grid gives {entry.embeds} embeddings for a span of {entry.length}"
        )


def _violate_misplaced_fields(deployment: Deployment, call: Call) -> None:
    for name in _RENDER_FIELDS:
        if name in call.body:
            deployment.violate(call, f"{name} belongs in a render body only")
    violate_fields(deployment, call, RANK_FIELDS, call.role)
    if deployment.config.kv_connector != "sglang" or call.role == "encode":
        violate_fields(deployment, call, BOOTSTRAP_FIELDS, call.role)
    elif "kv_transfer_params" in call.body:
        deployment.violate(call, f"kv_transfer_params in the body of {call.role}: SGLang reads none")
    nested = optional_object(call.body, "sampling_params") or {}
    for container, where in ((call.body, "extra_args"), (nested, "sampling_params.extra_args")):
        for name in TRANSFER_FIELDS:
            if name in (optional_object(container, "extra_args") or {}):
                deployment.violate(call, f"{name} in {where}: transfer parameters travel at the top level")
