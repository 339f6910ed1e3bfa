"""The decode role: answers with what it saw, so a lost or swapped item shows in the text."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import ApiError, internal_error
from sidecar.simulator.fields import optional_object
from sidecar.simulator.work import Work, admit, check_span

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.generation import Answer
    from sidecar.simulator.prompt import Api, Prompt

_REMOTE_KEYS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_WORD = re.compile(r"\S+\s*")


def decode(deployment: Deployment, call: Call, api: Api, request_id: str) -> Answer:
    """Generate the answer to a client's request.

    Raises:
        ApiError: what vLLM answers to a body it refuses; 412 where a probe with `Prefer: if-available` finds
            no KV blocks, as an endpoint picker in front of vLLM answers it.
    """
    work = admit_decode(deployment, call, api, request_id)
    hit = _find_kv(deployment, call, work.prompt)
    if not hit:
        if call.exchange.headers.get("prefer") == "if-available":
            raise ApiError(412, "no endpoint holds the prompt", kind="PreconditionFailed")
        _check_local_prefill(work)
    return generate_text(work, hit=hit)


def admit_decode(deployment: Deployment, call: Call, api: Api, request_id: str) -> Work:
    """Read a request to decode; raises ApiError for a body that vLLM refuses."""
    if api != "generate" and call.body.get("ec_transfer_params") is not None:
        deployment.violate(call, "ec_transfer_params in a decode body")
    return admit(deployment, call, api, request_id)


def generate_text(work: Work, *, hit: bool) -> Answer:
    """The answer that tells what decode saw; `hit` says whether it has the KV blocks of the prompt."""
    words = _words(_describe(work.prompt, hit=hit))
    shown = words[: work.sampling.max_tokens]
    return work.answer(
        shown,
        "stop" if len(shown) == len(words) else "length",
        cached_tokens=len(work.prompt.token_ids) if hit else 0,
    )


def _find_kv(deployment: Deployment, call: Call, prompt: Prompt) -> bool:
    key = prompt.key()
    params = optional_object(call.body, "kv_transfer_params") or {}
    if params.get("do_remote_decode") is True:
        deployment.violate(call, "kv_transfer_params.do_remote_decode in a decode body")
    if deployment.config.kv_connector == "shared":
        return key in deployment.kv
    if params.get("do_remote_prefill") is not True:
        return False
    return _pull_kv(deployment, call, params, key)


def _pull_kv(deployment: Deployment, call: Call, params: dict[str, Any], key: str) -> bool:
    missing = [name for name in _REMOTE_KEYS if params.get(name) is None]
    if missing:
        deployment.violate(call, f"kv_transfer_params lack {', '.join(missing)}")
        raise internal_error()
    remote_id = params["remote_request_id"]
    owner = deployment.kv_owner.get(remote_id) if isinstance(remote_id, str) else None
    if owner is None:
        deployment.violate(call, "kv_transfer_params.remote_request_id is none that prefill gave out")
        return False
    if owner != key:
        deployment.violate(call, "the KV blocks belong to another prompt than the one to be decoded")
        return False
    return True


def _check_local_prefill(work: Work) -> None:
    for entry in work.prompt.entries:
        check_span(work, entry)
        if entry.source == "metadata":
            raise work.deployment.recorder.crash(
                work.call.exchange,
                f"{entry.modality} {entry.key!r}: metadata only, and no KV blocks cover its span",
            )
        if entry.source == "cached":
            raise internal_error()


def _describe(prompt: Prompt, *, hit: bool) -> str:
    if prompt.entries:
        counts = Counter(entry.modality for entry in prompt.entries)
        totals = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
        items = ", ".join(
            f"{entry.label} (sha256 {entry.content[:8]})" if entry.content else f"(key {entry.key[:8]})"
            for entry in prompt.entries
        )
        seen = f"{totals}: {items}"
    else:
        seen = "no media"
    return f"I see {seen}; prompt {len(prompt.token_ids)} tokens, KV from prefill: {'hit' if hit else 'miss'}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text))
