"""The encode and prefill roles: what an engine does with a one-token request."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import internal_error
from sidecar.simulator.fields import optional_object
from sidecar.simulator.sampling import TRANSFER_FIELDS
from sidecar.simulator.serialization import AUDIO_FIELD, GRID_FIELD
from sidecar.simulator.work import Work, admit, check_span

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.generation import Answer
    from sidecar.simulator.prompt import Api, Entry, Prompt

_HIDDEN_SIZE = 2048
_BYTES_PER_ELEMENT = 2
_BLOCK_TOKENS = 16
_PEER = {"peer_host": "127.0.0.1", "peer_port": 5601}
_PEER_FIELDS = ("peer_host", "peer_port", "size_bytes", "shape")


def encode(deployment: Deployment, call: Call, api: Api, request_id: str) -> Answer:
    """Run the encoder over the media of a request and announce its outputs.

    Raises:
        ApiError: what vLLM answers to a body it refuses.
    """
    for name in TRANSFER_FIELDS:
        if call.body.get(name) is not None:
            deployment.violate(call, f"{name} in an encode body")
    work = _admit_capped(deployment, call, api, request_id)
    if not work.prompt.entries:
        deployment.violate(call, "an encode request without media")
    descriptors: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(work.prompt.entries):
        if entry.source in {"metadata", "cached"}:
            raise internal_error()
        if entry.embeds is None:
            raise internal_error("Internal server error: the item has no grid")
        if entry.key in descriptors:
            descriptors[entry.key]["item_indices"].append(index)
            continue
        place = (entry.modality, entry.key)
        if deployment.config.descriptors in {"evicted", "stale"}:
            deployment.encodings.drop(place)
        else:
            deployment.encodings.put(place, entry.embeds)
        descriptors[entry.key] = _descriptor(deployment, entry, entry.embeds, index)
    announced = descriptors if descriptors and deployment.config.descriptors != "none" else None
    return work.answer((), "stop", ec_params=announced)


def prefill(deployment: Deployment, call: Call, api: Api, request_id: str) -> Answer:
    """Compute the KV blocks of a prompt and say where they are.

    Raises:
        ApiError: what vLLM answers to a body it refuses, or to the request that killed its engine.
    """
    work = compute_prompt(deployment, call, api, request_id)
    return work.answer(("I",), "length", kv_params=_store_kv(deployment, call, work.prompt))


def compute_prompt(deployment: Deployment, call: Call, api: Api, request_id: str) -> Work:
    """Admit a prefill request and obtain the embeddings of its media; raises ApiError as `prefill` does."""
    work = _admit_capped(deployment, call, api, request_id)
    for entry in work.prompt.entries:
        check_span(work, entry)
        _obtain_embeddings(deployment, call, entry)
    return work


def _admit_capped(deployment: Deployment, call: Call, api: Api, request_id: str) -> Work:
    work = admit(deployment, call, api, request_id)
    sampling = work.sampling
    if sampling.stream:
        deployment.violate(call, "stream: true: a streamed answer carries no transfer parameters")
    if sampling.max_tokens != 1 or sampling.choices != 1:
        wanted = "any number of" if sampling.max_tokens is None else sampling.max_tokens
        deployment.violate(
            call, f"{wanted} tokens in {sampling.choices} choices asked for where one token is enough"
        )
    return work


def _descriptor(deployment: Deployment, entry: Entry, embeds: int, index: int) -> dict[str, Any]:
    kind = deployment.config.descriptors
    metadata: dict[str, Any] = {}
    if kind in {"nixl", "plain", "stale"}:
        if entry.grid is not None:
            metadata = {GRID_FIELD[entry.modality]: list(entry.grid)}
        else:
            metadata = {AUDIO_FIELD: [embeds]}
    descriptor: dict[str, Any] = {"item_indices": [index], "metadata": metadata}
    if deployment.config.vllm_version != "0.32":
        descriptor["modality"] = entry.modality
    if kind in {"nixl", "no-metadata"}:
        descriptor |= _PEER
        descriptor["size_bytes"] = embeds * _HIDDEN_SIZE * _BYTES_PER_ELEMENT
        descriptor["shape"] = [embeds, _HIDDEN_SIZE]
    return descriptor


def _obtain_embeddings(deployment: Deployment, call: Call, entry: Entry) -> None:
    place = (entry.modality, entry.key)
    name = f"{entry.modality} {entry.key!r}"
    stored = deployment.encodings.get(place)
    needed = entry.embeds if entry.source == "media" else entry.length
    announced = _announced(call, entry.key)
    by_peer = deployment.config.descriptors in {"nixl", "no-metadata", "evicted"}
    reachable = stored is not None and (announced is not None or not by_peer)
    if reachable and stored != needed:
        raise deployment.recorder.crash(
            call.exchange, f"{name}: the encoder output has {stored} embeddings, the prompt needs {needed}"
        )
    match entry.source:
        case "metadata":
            if stored is None:
                raise deployment.recorder.crash(
                    call.exchange, f"{name}: metadata only, and there is no encoder output under this key"
                )
            if by_peer and (announced is None or any(field not in announced for field in _PEER_FIELDS)):
                deployment.violate(call, f"{name}: metadata only, without the peer address of its descriptor")
                raise internal_error("Internal server error: the encoder output is not reachable")
        case "cached":
            if place not in deployment.processed:
                deployment.violate(
                    call, f"{name}: neither tensors nor metadata, and not in the processor cache"
                )
                raise internal_error()
        case "tensors" | "media":
            deployment.processed.put(place, None)


def _announced(call: Call, key: str) -> dict[str, Any] | None:
    descriptor = (optional_object(call.body, "ec_transfer_params") or {}).get(key)
    return descriptor if isinstance(descriptor, dict) else None


def _store_kv(deployment: Deployment, call: Call, prompt: Prompt) -> dict[str, Any] | None:
    asked = optional_object(call.body, "kv_transfer_params") or {}
    if asked.get("do_remote_decode") is not True:
        deployment.violate(call, "a prefill body without kv_transfer_params.do_remote_decode")
        return None
    if asked.get("do_remote_prefill") is True:
        deployment.violate(call, "kv_transfer_params.do_remote_prefill in a prefill body")
    key = prompt.key()
    deployment.invented_requests += 1
    remote_id = f"cmpl-{deployment.invented_requests}-{secrets.token_hex(4)}"
    deployment.kv.put(key, remote_id)
    if deployment.config.kv_connector == "shared":
        return None
    deployment.kv_owner.put(remote_id, key)
    blocks = -(-len(prompt.token_ids) // _BLOCK_TOKENS)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": "5e1f0a7c-prefill",
        "remote_request_id": remote_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(prompt.token_ids),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
