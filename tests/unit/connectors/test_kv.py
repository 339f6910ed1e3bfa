from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.connectors.kv import kv_connector
from sidecar.jsontext import Raw, read_object, segments

FROM_PREFILL = {"do_remote_decode": False, "do_remote_prefill": True}
ANSWER = Raw(
    b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_engine_id":"e\\u0031","remote_port":5600,'
    b'"do_remote_decode":true,"remote_blocks_expiry_time":1764435900.1230000,"future_field":{"a":[null]}}'
)


def _json(value: Any) -> Any:
    return json.loads(b"".join(segments(value)))


def test_shared_storage_sends_the_two_flags() -> None:
    """Prefill prepares for a remote decode, decode uses a remote prefill, whatever prefill answered."""
    kv = kv_connector("kv-shared-storage")
    assert _json(kv.prefill_params()) == {"do_remote_decode": True, "do_remote_prefill": False}
    assert _json(kv.decode_params(None)) == FROM_PREFILL
    assert _json(kv.decode_params(read_object(ANSWER))) == FROM_PREFILL


def test_nixl_prefill_has_the_remote_fields_unset() -> None:
    """Prefill gets the flags and the four remote fields as null."""
    assert _json(kv_connector("kv-nixl").prefill_params()) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_nixl_hands_the_answer_to_decode_verbatim() -> None:
    """Every member of prefill's answer reaches decode as the same text; only the two flags are set."""
    params = kv_connector("kv-nixl").decode_params(read_object(ANSWER))
    text = b"".join(segments(params))
    assert json.loads(text) == json.loads(bytes(ANSWER)) | FROM_PREFILL
    assert b'"e\\u0031"' in text
    assert b"1764435900.1230000" in text


def test_nixl_without_an_answer_lets_decode_compute_the_prompt() -> None:
    """Nothing to pull from: decode gets no transfer parameters."""
    assert kv_connector("kv-nixl").decode_params(None) is None


@pytest.mark.parametrize("name", ["kv-nixl", "kv-shared-storage"])
def test_one_request_cannot_change_the_parameters_of_the_next(name: str) -> None:
    """Every request gets parameters of its own."""
    kv = kv_connector(name)
    kv.prefill_params()["forged"] = 1
    decode = kv.decode_params({})
    assert decode is not None
    decode["forged"] = 1
    assert "forged" not in kv.prefill_params()
    assert "forged" not in (kv.decode_params({}) or {})
