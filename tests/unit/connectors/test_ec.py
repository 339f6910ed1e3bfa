from __future__ import annotations

import pytest

from sidecar.connectors.ec import ec_connector
from sidecar.jsontext import to_raw
from sidecar.multimodal.entries import Descriptor


def _descriptor(*, key: str = "h", has_peer: bool = True) -> Descriptor:
    return Descriptor(key, to_raw({"metadata": {}}), {}, has_peer)


def test_nixl_covers_what_names_its_worker() -> None:
    """With ec-nixl a descriptor under the entry's hash, with a peer address, is coverage."""
    assert ec_connector("ec-nixl", trust_descriptors=False).coverage_gap(_descriptor(), "h") == ""


@pytest.mark.parametrize(
    ("descriptor", "gap"),
    [
        (None, "no descriptor"),
        (_descriptor(key="other"), "no descriptor"),
        (_descriptor(has_peer=False), "descriptor without peer address"),
    ],
)
def test_nixl_gaps(descriptor: Descriptor | None, gap: str) -> None:
    """An encoding that is missing, under another key or evicted is no coverage, and the reason says which."""
    connector = ec_connector("ec-nixl", trust_descriptors=False)
    assert connector.coverage_gap(descriptor, "h") == gap
    assert connector.forwards_descriptors


def test_shared_storage_covers_nothing_by_itself() -> None:
    """A missing file would kill the engine: descriptors count only if the deployment vouches for them."""
    connector = ec_connector("ec-shared-storage", trust_descriptors=False)
    assert "ec-shared-storage" in connector.coverage_gap(_descriptor(), "h")
    assert not connector.forwards_descriptors


def test_trusted_shared_storage_needs_no_peer() -> None:
    """With trust, a descriptor under the entry's hash is coverage; files have no peer."""
    connector = ec_connector("ec-shared-storage", trust_descriptors=True)
    assert connector.forwards_descriptors
    assert connector.coverage_gap(_descriptor(has_peer=False), "h") == ""
    assert connector.coverage_gap(None, "h") == "no descriptor"
    assert connector.coverage_gap(_descriptor(key="other"), "h") == "no descriptor"
