"""The settings tree: every key, its default and its meaning.

The key names are the coordinator's where the coordinator has the key, so one file serves both. Attributes
hold seconds (float), bytes (int) and lower-case header names; the file holds `30s`, MB and names as people
write them. A key that is present but null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from sidecar.config.section import Section
from sidecar.config.steps import (
    AnyStep,
    ConditionalDecodeParams,
    DecodeParams,
    EcConnector,
    EncodeParams,
    KvConnector,
    MediaParams,
    MediaStep,
    ParamsT,
    PrefillDecodeParams,
    PrefillParams,
    RenderParams,
    RenderStep,
    Step,
    default_steps,
)
from sidecar.config.values import (
    AdminAddress,
    BaseUrl,
    Count,
    Duration,
    Flag,
    ForwardedHeader,
    ListenAddress,
    Megabytes,
    Namespace,
    PhaseToken,
    PositiveDuration,
    StrippedHeader,
    off_word,
    parse_log_level,
)

LogLevel = Literal["error", "warning", "info", "debug"]
LogFormat = Literal["json", "text"]
PromptTokenParity = Literal["off", "warn"]


class TlsSettings(Section):
    """TLS of the gRPC listener.

    Attributes:
        cert_path: directory with `tls.crt` and `tls.key`; "" serves plaintext h2c.
    """

    cert_path: str = ""


class ExtProcSettings(Section):
    """The Envoy side.

    Attributes:
        listen: `host:port`, `[v6]:port` or `unix:/path`.
        tls: certificate of the listener.
        max_request_body_size: bytes (MB in the file); a longer client body is answered 413.
        clear_route_cache: whether Envoy picks the route again after the rewrite.
        read_timeout: seconds for the whole upload; 408 after it.
        request_deadline: seconds for everything before decode; 504 after it.
        drain_timeout: seconds that running requests get at shutdown.
    """

    listen: ListenAddress = "0.0.0.0:9002"
    tls: TlsSettings = TlsSettings()
    max_request_body_size: Megabytes = 64 << 20
    clear_route_cache: Flag = True
    read_timeout: PositiveDuration = 30.0
    request_deadline: PositiveDuration = 120.0
    drain_timeout: Duration = 30.0


class AdminSettings(Section):
    """Metrics and health.

    Attributes:
        listen: `host:port` or `[v6]:port`; "" switches the server off.
    """

    listen: AdminAddress = "0.0.0.0:9090"


class LimitsSettings(Section):
    """What one process holds at a time; 503 beyond it.

    Attributes:
        max_in_flight_requests: coordinated requests.
        max_in_flight_bytes: bytes (MB in the file) of client bodies, render answers and downloaded media.
    """

    max_in_flight_requests: Count = 1024
    max_in_flight_bytes: Megabytes = 2048 << 20


class GatewaySettings(Section):
    """The gateway that carries encode and prefill.

    Attributes:
        address: base URL without a trailing slash.
        phase_token: secret that marks our own sub-requests, "" for none; `file:/path` in the file reads it
            from there.
        timeout: seconds until the head of an answer.
        max_idle_conns_per_host: kept-alive connections.
        idle_conn_timeout: seconds an idle connection is kept.
    """

    address: BaseUrl
    phase_token: PhaseToken = ""
    timeout: PositiveDuration = 60.0
    max_idle_conns_per_host: Count = 200
    idle_conn_timeout: PositiveDuration = 90.0


class ErrorsSettings(Section):
    """What the client reads of a failure.

    Attributes:
        expose_upstream: whether an upstream's error body reaches the client.
    """

    expose_upstream: Flag = False


class HeadersSettings(Section):
    """Client headers.

    Attributes:
        strip: more names that must not reach any leg, lower-case.
    """

    strip: tuple[StrippedHeader, ...] = ()


class ObservabilitySettings(Section):
    """Access-log metadata and tracing.

    Attributes:
        metadata_namespace: namespace of the dynamic metadata.
        tracing: always False; this version exports no spans of its own.
        prompt_token_parity: whether the prompt tokens that prefill and decode report are compared with the
            rendered ones.
    """

    metadata_namespace: Namespace = "epd.sidecar"
    tracing: Flag = False
    prompt_token_parity: Annotated[PromptTokenParity, BeforeValidator(off_word)] = "off"  # noqa: S105 - of a prompt


class PipelineSettings(Section):
    """The steps of every request, and what they share.

    Attributes:
        kv_connector: protocol between prefill and decode.
        ec_connector: protocol between encode and prefill.
        ec_trust_descriptors: whether descriptors of ec-shared-storage encoders are used.
        use_openai_format: whether encode and prefill get the client's own format (False: tokens in).
        forward_response_headers: response headers sent on later phases, lower-case.
        steps: in order, decode or prefill-decode last.
    """

    kv_connector: KvConnector = "kv-shared-storage"
    ec_connector: EcConnector = "ec-shared-storage"
    ec_trust_descriptors: Flag = False
    use_openai_format: Flag = True
    forward_response_headers: tuple[ForwardedHeader, ...] = ("x-llm-d-disagg-revision",)
    steps: tuple[AnyStep, ...]

    @model_validator(mode="before")
    @classmethod
    def _steps_may_be_left_out(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("steps") is None:
            return {**value, "steps": default_steps()}
        return value

    @property
    def media(self) -> MediaParams | None:
        """Params of replace-media-urls, or None without that step."""
        return self._params(MediaParams)

    @property
    def render(self) -> RenderParams | None:
        """Params of render, or None without that step."""
        return self._params(RenderParams)

    @property
    def conditional_decode(self) -> ConditionalDecodeParams | None:
        """Params of conditional-decode, or None without that step."""
        return self._params(ConditionalDecodeParams)

    @property
    def encode(self) -> EncodeParams | None:
        """Params of encode, or None without that step."""
        return self._params(EncodeParams)

    @property
    def prefill(self) -> PrefillParams | None:
        """Params of prefill, or None without that step."""
        return self._params(PrefillParams)

    @property
    def decode(self) -> DecodeParams | None:
        """Params of decode, or None without that step."""
        return self._params(DecodeParams)

    @property
    def prefill_decode(self) -> PrefillDecodeParams | None:
        """Params of prefill-decode, or None without that step."""
        return self._params(PrefillDecodeParams)

    def _params(self, kind: type[ParamsT]) -> ParamsT | None:
        for step in self.steps:
            if isinstance(step.params, kind):
                return step.params
        return None


class Settings(Section):
    """The whole configuration.

    Attributes:
        log_level: error, warning, info or debug.
        log_format: json or text lines.
        ext_proc: the Envoy side.
        admin: metrics and health.
        limits: what the process holds at a time.
        gateway: where encode and prefill go.
        errors: what clients read of failures.
        headers: client headers.
        observability: metadata and tracing.
        pipeline: the steps.
    """

    log_level: Annotated[LogLevel, BeforeValidator(parse_log_level)] = "info"
    log_format: LogFormat = "json"
    ext_proc: ExtProcSettings = ExtProcSettings()
    admin: AdminSettings = AdminSettings()
    limits: LimitsSettings = LimitsSettings()
    gateway: GatewaySettings
    errors: ErrorsSettings = ErrorsSettings()
    headers: HeadersSettings = HeadersSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    pipeline: PipelineSettings

    @model_validator(mode="before")
    @classmethod
    def _sections_may_be_left_out(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {**value, **{key: {} for key in ("gateway", "pipeline") if value.get(key) is None}}
        return value

    @model_validator(mode="after")
    def _steps_inherit(self) -> Self:
        shared = {
            "timeout": self.gateway.timeout,
            "use_openai_format": self.pipeline.use_openai_format,
            "ec_connector": self.pipeline.ec_connector,
            "kv_connector": self.pipeline.kv_connector,
        }
        steps = tuple(_inherit(step, shared) for step in self.pipeline.steps)
        # The tree is still being built here; frozen guards it from everybody else.
        object.__setattr__(self.pipeline, "steps", steps)
        return self


def _inherit(step: Step, shared: dict[str, Any]) -> Step:
    if isinstance(step, MediaStep | RenderStep):
        return step
    params = step.params
    missing = type(params).model_fields.keys() - params.model_fields_set
    inherited = {key: value for key, value in shared.items() if key in missing}
    return step.model_copy(update={"params": params.model_copy(update=inherited)})
