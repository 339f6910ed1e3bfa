"""The knobs of the simulator: what the simulated deployment looks like and how it misbehaves."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import msgspec

Role = Literal["render", "encode", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
Target = Literal["render", "encode", "prefill", "decode", "reserve"]
"""What a latency or a fault applies to: a role, or the endpoint picker's answer to a reservation."""
TARGETS: tuple[Target, ...] = get_args(Target)
Listener = Literal["render", "encode", "prefill", "decode", "admin"]
LISTENERS: tuple[Listener, ...] = get_args(Listener)
Descriptors = Literal["nixl", "none", "evicted", "no-metadata", "plain", "stale"]
VllmVersion = Literal["0.32", "0.33"]
KvConnector = Literal["nixl", "shared", "sglang"]

TRANSPORT_FAULTS = ("garbage", "drop-before-headers", "drop-after-headers", "hang")
"""Faults of the connection or of the whole body, for every role."""
REFUSALS = ("scale-out-403", "not-found", "model-not-found")
"""Well-formed refusals that point at the deployment rather than at the request, for every role."""
RENDER_FAULTS = ("wrong-counts", "overlapping-spans", "span-out-of-range", "null-kwargs", "null-items")
"""Well-formed render answers that contradict themselves."""
RESERVATION_FAULTS = ("no-header", "header:<value>")
"""Reservations answered without an endpoint, or with that text in its place."""

_FAULT = re.compile(r"(?P<kind>status:[2-5]\d\d|header:[ -)+-~]*|[a-z0-9-]+)(\*(?P<times>[1-9]\d*))?")
_PATTERNS = {"status": "status:<code>", "header": "header:<value>"}
_OWN_FAULTS: dict[Target, tuple[str, ...]] = {"render": RENDER_FAULTS, "reserve": RESERVATION_FAULTS}
MIN_TENSOR_BYTES = 64
_HIGHEST_PORT = 65535


class ConfigError(ValueError):
    """A knob has a value it cannot have; the message names both."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One configured fault.

    Attributes:
        kind: a name of TRANSPORT_FAULTS, REFUSALS or RENDER_FAULTS, `status:<code>`, or one of
            RESERVATION_FAULTS with its value.
        times: how many more requests it hits, None for all of them.
    """

    kind: str
    times: int | None


@dataclass(slots=True)
class SimulatorConfig:
    """What is simulated. All but `host` and `ports` may be changed between two requests.

    Attributes:
        host: address all listeners bind to.
        ports: port per listener (`render`, `encode`, `prefill`, `decode`, `admin`); 0 takes a free one.
        vllm_version: version whose answers are given; 0.33 adds `modality` to descriptors and renders the
            client's transfer parameters at the top level.
        models: names the deployment serves; the first is used when a body names none.
        descriptors: what encode answers about its outputs: `nixl` with a peer address, `plain` without
            (shared storage), `stale` like `plain` by an encoder that still knows the item while its stored
            output is lost, `no-metadata` with an address and an empty `metadata`, `evicted` with neither
            and the output lost, `none` for an engine that answers no descriptors.
        encoder_caches: False makes an encoder that runs without caches and invents keys for media that carry
            no `uuid`.
        mm_payload_supported: False makes a renderer that ignores `mm_payload` and `return_mm_kwargs`.
        render_metadata: whether render answers carry `mm_metadata`.
        tool_parser: False makes a deployment without `--enable-auto-tool-choice` and `--tool-call-parser`.
        prompt_tokens_details: whether `usage` tells how many prompt tokens came out of a cache.
        prompt_token_skew: per role, how many prompt tokens too many `usage` reports.
        trust_mm_kwargs: whether bodies may set `mm_processor_kwargs` and `media_io_kwargs`.
        tensor_bytes: bytes of the processed tensor of one item, or `real` to take them from the image.
        min_pixels: smallest image area the processor keeps, in pixels.
        max_pixels: largest image area the processor keeps, in pixels.
        encode_max_pixels: another `max_pixels` for the encode role (a processor mismatch), None for the same.
        sparse_spans: placeholder spans also cover the token on either side, as for Gemma3.
        max_images: images one prompt may hold, 0 for any number.
        max_model_len: prompt plus output, in tokens.
        kv_connector: how KV blocks get from prefill to decode: `nixl` or `shared` storage as in vLLM, or
            `sglang`, where both meet under a bootstrap room and prefill is reserved and pinned.
        bootstrap_port: port of prefill's bootstrap server, as the bodies name it; nothing listens there.
        bootstrap_timeout: seconds prefill waits for its decode, and decode for its prefill.
        latency: seconds each role waits before it answers; `reserve` for reservations, which prefill's
            own latency does not delay.
        chunk_delay: seconds between two events of a streamed decode answer.
        faults: per role a fault, optionally with a count: `hang`, `status:503*2`; "" for none. Reservations
            take those of `reserve` and none of `prefill`.
    """

    host: str = "127.0.0.1"
    ports: dict[Listener, int] = field(default_factory=dict)
    vllm_version: VllmVersion = "0.32"
    models: list[str] = field(default_factory=lambda: ["simulated-vl"])
    descriptors: Descriptors = "nixl"
    encoder_caches: bool = True
    mm_payload_supported: bool = True
    render_metadata: bool = True
    tool_parser: bool = True
    prompt_tokens_details: bool = False
    prompt_token_skew: dict[Role, int] = field(default_factory=dict)
    trust_mm_kwargs: bool = False
    tensor_bytes: int | Literal["real"] = "real"
    min_pixels: int = 3136
    max_pixels: int = 12845056
    encode_max_pixels: int | None = None
    sparse_spans: bool = False
    max_images: int = 0
    max_model_len: int = 1 << 23
    kv_connector: KvConnector = "nixl"
    bootstrap_port: int = 8998
    bootstrap_timeout: float = 300.0
    latency: dict[Target, float] = field(default_factory=dict)
    chunk_delay: float = 0.002
    faults: dict[Target, str] = field(default_factory=dict)

    def patched(self, changes: dict[str, Any]) -> SimulatorConfig:
        """A copy with some knobs changed; those that are mappings merge per key.

        Raises:
            ConfigError: unknown knob or impossible value.
        """
        known = {knob.name for knob in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise ConfigError(f"unknown knob {unknown[0]!r}; known: {', '.join(sorted(known))}")
        merged = asdict(self)
        for name, value in changes.items():
            if isinstance(merged[name], dict) and isinstance(value, dict):
                merged[name] |= value
            else:
                merged[name] = value
        try:
            config = msgspec.convert(merged, SimulatorConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for values that no type rules out."""
        if not self.models:
            raise ConfigError("models: name at least one")
        if self.tensor_bytes != "real" and self.tensor_bytes < MIN_TENSOR_BYTES:
            raise ConfigError(f"tensor_bytes: {self.tensor_bytes} is below the minimum of {MIN_TENSOR_BYTES}")
        if not 0 < self.bootstrap_port <= _HIGHEST_PORT:
            raise ConfigError(f"bootstrap_port: {self.bootstrap_port} is not from 1 to {_HIGHEST_PORT}")
        if not 0 < self.bootstrap_timeout < math.inf:
            raise ConfigError(f"bootstrap_timeout: {self.bootstrap_timeout} is no number of seconds above 0")
        for target, spec in self.faults.items():
            read_fault(target, spec)

    def take_fault(self, target: Target) -> str:
        """The fault that hits the next request of a target, "" for none; counts a limited one down."""
        text = self.faults.get(target, "")
        if not text:
            return ""
        fault = read_fault(target, text)
        if fault.times is not None:
            self.faults[target] = f"{fault.kind}*{fault.times - 1}" if fault.times > 1 else ""
        return fault.kind


def read_fault(target: Target, text: str) -> FaultSpec:
    """Read `kind` or `kind*times`; raises ConfigError."""
    if not text:
        return FaultSpec("", None)
    match = _FAULT.fullmatch(text)
    allowed = ("status:<code>", *TRANSPORT_FAULTS, *REFUSALS, *_OWN_FAULTS.get(target, ()))
    name, has_value, _ = match["kind"].partition(":") if match else ("", "", "")
    if match is None or (_PATTERNS[name] if has_value else name) not in allowed:
        raise ConfigError(
            f"faults.{target}: {text!r} is none of {', '.join(allowed)}; append *<times> to limit it"
        )
    return FaultSpec(match["kind"], int(match["times"]) if match["times"] else None)
