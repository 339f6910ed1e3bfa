"""KV-cache connectors of engines that prefill first: what prefill is told, and decode of prefill's answer.

Where both run at the same time (`kv-sglang`), nothing can be told of an answer: see `sglang.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.jsontext import Raw

_TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_FROM_PREFILL = {"do_remote_decode": False, "do_remote_prefill": True}


class KvConnector(Protocol):
    """How the KV cache of a prompt gets from prefill to decode."""

    def prefill_params(self) -> dict[str, Any]:
        """`kv_transfer_params` of the prefill call."""

    def decode_params(self, prefill_answer: Mapping[str, Raw] | None) -> dict[str, Any] | None:
        """`kv_transfer_params` of decode, from those prefill answered; None leaves the member out."""


class SharedStorageKv:
    """The engines share a store keyed by the prompt: both sides only need to know their role."""

    def prefill_params(self) -> dict[str, Any]:
        """The two role flags."""
        return dict(_TO_DECODE)

    def decode_params(
        self,
        prefill_answer: Mapping[str, Raw] | None,  # noqa: ARG002 - the shared store holds the answer
    ) -> dict[str, Any] | None:
        """The two role flags, whatever prefill answered."""
        return dict(_FROM_PREFILL)


class NixlKv:
    """Decode pulls the cache from the prefill worker that its answer names."""

    def prefill_params(self) -> dict[str, Any]:
        """The role flags and the remote fields, still unset."""
        return {
            **_TO_DECODE,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, prefill_answer: Mapping[str, Raw] | None) -> dict[str, Any] | None:
        """Prefill's answer verbatim, role flags set; without one, decode computes the prompt itself."""
        if prefill_answer is None:
            return None
        return {**prefill_answer, **_FROM_PREFILL}


def kv_connector(name: str) -> KvConnector:
    """The connector of a configured name."""
    return _CONNECTORS[name]


_CONNECTORS: Mapping[str, KvConnector] = {"kv-nixl": NixlKv(), "kv-shared-storage": SharedStorageKv()}
