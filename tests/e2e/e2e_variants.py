"""The sidecar configurations the end-to-end tests share."""

from __future__ import annotations

from tests.e2e.e2e_stack import Variant

NIXL = {"kv_connector": "kv-nixl", "ec_connector": "ec-nixl"}
SHARED_EC = {"kv_connector": "kv-nixl", "ec_connector": "ec-shared-storage"}


def form_variant(*, openai: bool, mm_payload: str, descriptors: bool) -> Variant:
    """One way media travel: the format of encode and prefill, tensors or not, descriptors used or not."""
    return Variant(
        pipeline={**(NIXL if descriptors else SHARED_EC), "use_openai_format": openai},
        steps={"render": {"mm_payload": mm_payload}},
    )


NONE_NIXL = form_variant(openai=False, mm_payload="none", descriptors=True)
"""Generate format, tensors omitted, descriptors used."""

TENSORS_NIXL = form_variant(openai=False, mm_payload="tensors", descriptors=True)
"""Generate format, tensors rendered, descriptors used."""
