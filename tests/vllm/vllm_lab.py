"""Engines, relays, and one Envoy with its sidecar per variant: what every test here works with."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import uuid
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.request import Request, urlopen

import openai
import pytest

from deploy.envoy.local_stack import (
    DECODE,
    ENCODE,
    ENVOY_ADMIN,
    EXTERNAL,
    INTERNAL,
    PREFILL,
    RENDER,
    SIDECAR,
    SIDECAR_ADMIN,
    LocalStack,
    free_ports,
    load_bootstrap,
    load_sidecar_config,
)
from tests.vllm.install_vllm import HERE, python
from tests.vllm.vllm_client import TIMEOUT, Answer, alone, ask, difference
from tests.vllm.vllm_relay import Relay

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.vllm.vllm_engines import Engines

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"

_CLIP = HERE / "video_clip.py"

TOLERANCE = 1e-4
"""Largest logprob difference of equal answers: with shared KV blocks, float32 sums may differ in order."""

NOTICED = 1e-2
"""Smallest logprob difference that a wrong picture makes; measured ones are around 1."""

NOT_TRUSTED = "image[0]: no descriptor (ec-shared-storage does not use descriptors)"


@dataclass(frozen=True)
class Variant:
    """One way media travel through the phases, and what the access log then says of a request with media.

    Attributes:
        name: for test ids and file names.
        format: of encode and prefill, `pipeline.use_openai_format`.
        mm_payload: of the render step.
        encode_form: expected.
        prefill_form: expected.
        fallback_reason: expected.
        trust: `pipeline.ec_trust_descriptors`.
        on_failure: of the encode step.
        encode_down: whether the encode route leads to a port nobody listens on.
    """

    name: str
    format: Literal["openai", "generate"]
    mm_payload: Literal["tensors", "none", "auto"]
    encode_form: str
    prefill_form: str
    fallback_reason: str = ""
    trust: bool = False
    on_failure: Literal["fail", "local"] = "fail"
    encode_down: bool = False

    def __str__(self) -> str:
        return self.name


OPENAI = Variant("openai", "openai", "tensors", "openai", "openai")
TENSORS = Variant("tensors", "generate", "tensors", "features", "kwargs_data", NOT_TRUSTED)
TENSORS_TRUST = Variant("tensors-trust", "generate", "tensors", "features", "mm_metadata", trust=True)
NONE = Variant("none", "generate", "none", "content_parts", "content_parts", NOT_TRUSTED)
NONE_TRUST = Variant("none-trust", "generate", "none", "content_parts", "mm_metadata", trust=True)
AUTO = replace(NONE_TRUST, name="auto", mm_payload="auto")

VARIANTS = (OPENAI, TENSORS, TENSORS_TRUST, NONE, NONE_TRUST)
"""The ways there are; the first is the default configuration. AUTO chooses one of two by the model."""

UNTRUSTED = tuple(variant for variant in VARIANTS if not variant.trust)
"""Those that stay correct whatever happens to the encoder's store."""


class Stack:
    """One Envoy with one sidecar of one variant in front of the engines."""

    def __init__(self, variant: Variant, workers: Mapping[int, int], directory: Path) -> None:
        ports = free_ports((EXTERNAL, INTERNAL, ENVOY_ADMIN, SIDECAR, SIDECAR_ADMIN, ENCODE))
        if variant.encode_down:
            workers = {port: number for port, number in workers.items() if port != ENCODE}
        ports |= workers
        self._local = LocalStack(directory, ports)
        config = load_sidecar_config(ports)
        config["pipeline"] |= {
            "use_openai_format": variant.format == "openai",
            "ec_connector": "ec-shared-storage",
            "kv_connector": "kv-shared-storage",
            "ec_trust_descriptors": variant.trust,
        }
        for step in config["pipeline"]["steps"]:
            if step["type"] == "render":
                step["params"]["mm_payload"] = variant.mm_payload
            elif step["type"] == "encode":
                step["params"]["on_failure"] = variant.on_failure
        try:
            self._local.sidecar(config)
            self._local.envoy(load_bootstrap("bootstrap.yaml", ports, self._local.access_log))
        except BaseException:
            self._local.stop()
            raise

    @property
    def base(self) -> str:
        """URL of the listener clients use."""
        return self._local.url(EXTERNAL)

    def log_line(self, request_id: str) -> dict[str, str]:
        """The access-log record of one request; Envoy writes it a little after the answer."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for line in self._local.access_log.read_text("utf-8").splitlines(keepends=True):
                if line.endswith("\n") and (record := json.loads(line))["request_id"] == request_id:
                    return dict(record)
            time.sleep(0.02)
        raise AssertionError(f"no access-log line of {request_id}")

    def close(self) -> None:
        self._local.stop()


@dataclass(frozen=True)
class Refusal:
    """An error answer, and the access-log record of its request."""

    status: int
    message: str
    record: dict[str, str]


@dataclass
class Lab:
    """Everything that runs, for the whole session.

    Attributes:
        engines: vLLM.
        encode: relay in front of the encoder.
        prefill: relay in front of prefill.
        differences: largest logprob difference of every comparison that held.
    """

    engines: Engines
    directory: Path
    differences: list[float] = field(default_factory=list)
    _stacks: dict[str, Stack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encode = Relay(self.engines.url("encode"))
        self.prefill = Relay(self.engines.url("prefill"))

    def close(self) -> None:
        self.engines.stop()
        for stack in self._stacks.values():
            stack.close()
        self.encode.close()
        self.prefill.close()

    def reset(self) -> None:
        """Empty stores, relays that pass everything unchanged."""
        self.encode.reset()
        self.prefill.reset()
        self.engines.clear_stores()

    def stack(self, variant: Variant) -> Stack:
        """The stack of a variant, started when first asked for."""
        if variant.name not in self._stacks:
            directory = self.directory / f"stack-{variant.name}"
            directory.mkdir(exist_ok=True)
            workers = {
                RENDER: self.engines.port("render"),
                ENCODE: self.encode.port,
                PREFILL: self.prefill.port,
                DECODE: self.engines.port("decode"),
            }
            self._stacks[variant.name] = Stack(variant, workers, directory)
        return self._stacks[variant.name]

    def coordinate(
        self, variant: Variant, body: Mapping[str, Any], *, stream: bool = False
    ) -> tuple[Answer, dict[str, str]]:
        """Send a request through Envoy; the answer and its access-log record."""
        stack, request_id = self.stack(variant), uuid.uuid4().hex
        answer = ask(stack.base, body, stream=stream, headers={"x-request-id": request_id})
        return answer, stack.log_line(request_id)

    def refused(self, variant: Variant, body: Mapping[str, Any]) -> Refusal:
        """Send a request through Envoy that must fail."""
        stack, request_id = self.stack(variant), uuid.uuid4().hex
        with pytest.raises(openai.APIStatusError) as caught:
            ask(stack.base, body, headers={"x-request-id": request_id})
        error = caught.value
        message = error.body["message"] if isinstance(error.body, dict) else error.body
        return Refusal(error.status_code, str(message), stack.log_line(request_id))

    def alone(self, body: Mapping[str, Any], salt: str) -> Answer:
        """What the decode engine answers when it is asked directly and computes everything itself."""
        self.engines.clear("kv")
        return ask(self.engines.url("decode"), alone(body, salt))

    def same(self, answer: Answer, expected: Answer) -> None:
        """Fail unless text, reasons, prompt length, tool calls and logprobs are equal."""
        assert answer.texts == expected.texts
        assert answer.finish_reasons == expected.finish_reasons
        assert answer.prompt_tokens == expected.prompt_tokens
        assert answer.calls == expected.calls
        gap = difference(answer, expected)
        assert gap <= TOLERANCE, f"logprobs differ by {gap}"
        self.differences.append(gap)

    def render(self, body: Mapping[str, Any]) -> Any:
        """What the renderer answers with tensors when it is asked directly."""
        request = Request(  # noqa: S310 (a loopback http URL built here)
            f"{self.engines.url('render')}{CHAT}/render",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 (as above)
            return json.loads(response.read())

    def video(self, seed: str, *, frames: int = 12, rate: int = 4) -> dict[str, Any]:
        """A part with a video no engine has seen before.

        Args:
            seed: decides the colours.
            frames: length.
            rate: frames per second.
        """
        number = str(zlib.crc32(seed.encode()))
        command = (str(python(self.engines.home)), str(_CLIP), number, str(frames), str(rate))
        made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        url = f"data:video/mp4;base64,{base64.b64encode(made.stdout).decode()}"
        return {"type": "video_url", "video_url": {"url": url}}


def legs(lab: Lab) -> list[tuple[str, int]]:
    """Path and status of what encode and prefill answered, in order."""
    return [(item.path, item.status) for relay in (lab.encode, lab.prefill) for item in relay.passed]
