"""The prompt tokens that simulated engines report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.simulator.config import ConfigError
from tests.unit.simulator.simulator_caller import CHAT, FOR_PREFILL, Caller, chat, decode_body

if TYPE_CHECKING:
    from sidecar.simulator import Simulator

MESSAGES = "/v1/messages"
TURN = {"model": "simulated-vl", "max_tokens": 1, "messages": [{"role": "user", "content": "What is this?"}]}


async def _prefilled(caller: Caller, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await caller.post(
        "prefill", path, body | {"max_tokens": 1, "kv_transfer_params": FOR_PREFILL}
    )
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


async def test_a_role_may_count_too_many_tokens(simulator: Simulator, caller: Caller) -> None:
    """The skew of one role shows in its usage alone."""
    tokens = (await _prefilled(caller, CHAT, chat()))["usage"]["prompt_tokens"]
    simulator.configure({"prompt_token_skew": {"prefill": 3}})
    simulator.configure({"prompt_token_skew": {"decode": -1}})
    prefilled = await _prefilled(caller, CHAT, chat())
    _, decoded = await caller.post("decode", CHAT, decode_body(chat(), prefilled))
    assert (prefilled["usage"]["prompt_tokens"], decoded["usage"]["prompt_tokens"]) == (
        tokens + 3,
        tokens - 1,
    )


@pytest.mark.parametrize("skew", [{"router": 1}, {"decode": "1"}, 1])
def test_a_skew_is_a_number_per_role(simulator: Simulator, skew: Any) -> None:
    """Anything else is no configuration."""
    with pytest.raises(ConfigError):
        simulator.configure({"prompt_token_skew": skew})


async def test_anthropic_input_tokens_are_those_not_cached(simulator: Simulator, caller: Caller) -> None:
    """What came from the cache is taken off the input tokens and told beside them, as vLLM does it."""
    plain = (await _prefilled(caller, MESSAGES, TURN))["usage"]
    assert plain == {"input_tokens": plain["input_tokens"], "output_tokens": 1}
    simulator.config.prompt_tokens_details = True
    prefilled = await _prefilled(caller, MESSAGES, TURN)
    _, decoded = await caller.post("decode", MESSAGES, decode_body(TURN, prefilled))
    assert decoded["usage"] == {
        "input_tokens": 0,
        "output_tokens": 1,
        "cache_read_input_tokens": plain["input_tokens"],
        "cache_creation_input_tokens": 0,
    }


async def test_an_anthropic_stream_tells_of_the_cache_at_its_end(
    simulator: Simulator, caller: Caller
) -> None:
    """The first event counts the whole prompt, the last one takes the cached part off."""
    simulator.config.prompt_tokens_details = True
    prefilled = await _prefilled(caller, MESSAGES, TURN)
    body = decode_body(TURN, prefilled) | {"stream": True}
    async with caller.send("decode", MESSAGES, body) as response:
        lines = (await response.text()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    (started,) = [event["message"] for event in events if event["type"] == "message_start"]
    (ended,) = [event for event in events if event["type"] == "message_delta"]
    tokens = started["usage"]["input_tokens"]
    assert started["usage"] == {"input_tokens": tokens, "output_tokens": 0}
    assert ended["usage"].items() >= {"input_tokens": 0, "cache_read_input_tokens": tokens}.items()
