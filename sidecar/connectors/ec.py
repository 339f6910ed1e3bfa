"""Encoder-cache connectors: which descriptors of an encode answer prefill may rely on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.multimodal.entries import Descriptor


@dataclass(frozen=True, slots=True)
class EcConnector:
    """How encoder output gets from encode to prefill.

    Attributes:
        forwards_descriptors: whether descriptors are sent to prefill, and count as coverage of an entry. A
            metadata-only prefill whose encoder output cannot be found kills its engine, so coverage is only
            what the deployment vouches for.
        needs_peer: whether a descriptor without the address of a worker is no coverage: that is how an
            engine announces an evicted encoding.
        ignored_because: what the access log says about descriptors that are not forwarded.
    """

    forwards_descriptors: bool
    needs_peer: bool = False
    ignored_because: str = ""

    def coverage_gap(self, descriptor: Descriptor | None, expected_key: str) -> str:
        """Why an entry is not covered by its descriptor; "" when it is."""
        if not self.forwards_descriptors:
            return f"no descriptor ({self.ignored_because})"
        if descriptor is None or descriptor.key != expected_key:
            return "no descriptor"
        if self.needs_peer and not descriptor.has_peer:
            return "descriptor without peer address"
        return ""


def ec_connector(name: str, *, trust_descriptors: bool) -> EcConnector:
    """The connector of a configured name.

    Args:
        name: `ec-nixl` or `ec-shared-storage`.
        trust_descriptors: `pipeline.ec_trust_descriptors`; lets ec-shared-storage rely on descriptors.
    """
    if name == "ec-nixl":
        return EcConnector(forwards_descriptors=True, needs_peer=True)
    return EcConnector(
        forwards_descriptors=trust_descriptors, ignored_because="ec-shared-storage does not use descriptors"
    )
