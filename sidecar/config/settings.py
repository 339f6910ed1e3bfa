"""The settings tree: every key, its default and its meaning.

The key names are the coordinator's where the coordinator has the key, so one file serves both. Attributes
hold seconds (float), bytes (int) and lower-case header names; the file holds `30s`, MB and names as people
write them. A key that is present but null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag, model_validator

from sidecar.config.values import (
    AdminAddress,
    BaseUrl,
    ContentType,
    Count,
    CountOrUnlimited,
    Domain,
    Duration,
    Flag,
    ForwardedHeader,
    ListenAddress,
    Megabytes,
    Namespace,
    PhaseToken,
    PositiveDuration,
    StrippedHeader,
    parse_log_level,
)

LogLevel = Literal["error", "warning", "info", "debug"]
LogFormat = Literal["json", "text"]
KvConnector = Literal["kv-nixl", "kv-shared-storage"]
EcConnector = Literal["ec-nixl", "ec-shared-storage"]
MmPayload = Literal["tensors", "none", "auto"]
OnFailure = Literal["fail", "local"]
SparseSpans = Literal["openai", "verbatim"]


class Section(BaseModel):
    """One mapping of the file: immutable, and closed to unknown keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


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
    """

    metadata_namespace: Namespace = "epd.sidecar"
    tracing: Flag = False


class MediaParams(Section):
    """Params of `replace-media-urls`.

    Attributes:
        download_timeout: seconds per download.
        max_concurrent_downloads: downloads of one request at a time.
        max_multimodal_entries: media items per request; 0 is unlimited.
        max_download_size: bytes (MB in the file) per download.
        max_image_download_size: the same for images; likewise for audio and video. `max_download_size` if not
            set.
        allowed_image_content_types: media types of images, downloaded or inline; likewise for audio and
            video. Empty allows all that engines read.
        allow_private_networks: whether RFC 1918 addresses may be fetched.
        allowed_domains: lower-case host names that may be fetched; empty allows all.
    """

    download_timeout: PositiveDuration = 10.0
    max_concurrent_downloads: Count = 10
    max_multimodal_entries: CountOrUnlimited = 0
    max_download_size: Megabytes = 10 << 20
    max_image_download_size: Megabytes | None = None
    max_audio_download_size: Megabytes | None = None
    max_video_download_size: Megabytes | None = None
    allowed_image_content_types: tuple[ContentType, ...] = ()
    allowed_audio_content_types: tuple[ContentType, ...] = ()
    allowed_video_content_types: tuple[ContentType, ...] = ()
    allow_private_networks: Flag = False
    allowed_domains: tuple[Domain, ...] = ()

    def download_size(self, modality: str) -> int:
        """Largest download of a modality, in bytes."""
        sizes = {
            "image": self.max_image_download_size,
            "audio": self.max_audio_download_size,
            "video": self.max_video_download_size,
        }
        return sizes[modality] or self.max_download_size

    def content_types(self, modality: str) -> frozenset[str]:
        """Media types allowed for a modality; empty for the default."""
        types = {
            "image": self.allowed_image_content_types,
            "audio": self.allowed_audio_content_types,
            "video": self.allowed_video_content_types,
        }
        return frozenset(types[modality])


class RenderParams(Section):
    """Params of `render`.

    Attributes:
        address: base URL of the render service without a trailing slash.
        timeout: seconds for the call.
        mm_payload: whether the renderer sends the processed tensors; `auto` asks it not to, and asks again
            for a model whose media cannot travel without them.
        max_total_tokens: prompt tokens; 0 is unlimited.
        max_total_placeholder_tokens: placeholder tokens; 0 is unlimited.
        max_idle_conns_per_host: kept-alive connections.
        idle_conn_timeout: seconds an idle connection is kept.
    """

    address: BaseUrl
    timeout: PositiveDuration = 30.0
    mm_payload: MmPayload = "tensors"
    max_total_tokens: CountOrUnlimited = 0
    max_total_placeholder_tokens: CountOrUnlimited = 0
    max_idle_conns_per_host: Count = 100
    idle_conn_timeout: PositiveDuration = 90.0


class ConditionalDecodeParams(Section):
    """Params of `conditional-decode`; what the file leaves out comes from the gateway.

    Attributes:
        timeout: seconds until the answer, and until its end where it is not streamed; `gateway.timeout` if
            not set.
    """

    timeout: PositiveDuration = 60.0


class EncodeParams(Section):
    """Params of `encode`; what the file leaves out comes from the pipeline and the gateway.

    Attributes:
        max_parallel: sub-requests of one request at a time.
        timeout: seconds for the step; `gateway.timeout` if not set.
        use_openai_format: `pipeline.use_openai_format` if not set.
        ec_connector: `pipeline.ec_connector` if not set.
        on_failure: `fail` fails the request, `local` leaves the item to the prefill worker, unless the
            encoder said 4xx.
    """

    max_parallel: Count = 8
    timeout: PositiveDuration = 60.0
    on_failure: OnFailure = "fail"
    use_openai_format: Flag = True
    ec_connector: EcConnector = "ec-shared-storage"


class PrefillParams(Section):
    """Params of `prefill`; what the file leaves out comes from the pipeline and the gateway.

    Attributes:
        timeout: seconds for the step; `gateway.timeout` if not set.
        sparse_spans: how a prompt with mixed-token spans travels.
        use_openai_format: `pipeline.use_openai_format` if not set.
        ec_connector: `pipeline.ec_connector` if not set.
        kv_connector: `pipeline.kv_connector` if not set.
    """

    timeout: PositiveDuration = 60.0
    sparse_spans: SparseSpans = "openai"
    use_openai_format: Flag = True
    ec_connector: EcConnector = "ec-shared-storage"
    kv_connector: KvConnector = "kv-shared-storage"


class DecodeParams(Section):
    """Params of `decode`.

    Attributes:
        kv_connector: `pipeline.kv_connector` if not set.
    """

    kv_connector: KvConnector = "kv-shared-storage"


class _Step(Section):
    @model_validator(mode="before")
    @classmethod
    def _params_may_be_left_out(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("params") is None:
            return {**value, "params": {}}
        return value


class MediaStep(_Step):
    """Inlines media URLs as data URIs."""

    type: Literal["replace-media-urls"]
    params: MediaParams


class RenderStep(_Step):
    """Tokenizes the request."""

    type: Literal["render"]
    params: RenderParams


class ConditionalDecodeStep(_Step):
    """Asks for a decode worker that holds the prompt already."""

    type: Literal["conditional-decode"]
    params: ConditionalDecodeParams


class EncodeStep(_Step):
    """Sends each media item to an encoder."""

    type: Literal["encode"]
    params: EncodeParams


class PrefillStep(_Step):
    """Computes the prompt's KV cache."""

    type: Literal["prefill"]
    params: PrefillParams


class DecodeStep(_Step):
    """Hands the rewritten request to Envoy; always the last step."""

    type: Literal["decode"]
    params: DecodeParams


Step = MediaStep | RenderStep | ConditionalDecodeStep | EncodeStep | PrefillStep | DecodeStep

STEP_TYPES: dict[str, type[Step]] = {
    "replace-media-urls": MediaStep,
    "render": RenderStep,
    "conditional-decode": ConditionalDecodeStep,
    "encode": EncodeStep,
    "prefill": PrefillStep,
    "decode": DecodeStep,
}
"""Step classes by type, in the order the pipeline runs them."""

_OPT_IN = frozenset({"conditional-decode"})
"""Steps a pipeline has only if the file lists them."""


def _step_type(step: Any) -> str | None:
    kind = step.get("type") if isinstance(step, dict) else getattr(step, "type", None)
    return kind if isinstance(kind, str) else None


# A callable discriminator: the named one prints whatever stands for the type, and a few lines of nested YAML
# aliases take forever to print.
_AnyStep = Annotated[
    Annotated[MediaStep, Tag("replace-media-urls")]
    | Annotated[RenderStep, Tag("render")]
    | Annotated[ConditionalDecodeStep, Tag("conditional-decode")]
    | Annotated[EncodeStep, Tag("encode")]
    | Annotated[PrefillStep, Tag("prefill")]
    | Annotated[DecodeStep, Tag("decode")],
    Discriminator(_step_type),
]

_ParamsT = TypeVar("_ParamsT", bound=Section)


def default_steps() -> list[dict[str, Any]]:
    """The usual steps without params, as the file would list them."""
    return [{"type": name} for name in STEP_TYPES if name not in _OPT_IN]


class PipelineSettings(Section):
    """The steps of every request, and what they share.

    Attributes:
        kv_connector: protocol between prefill and decode.
        ec_connector: protocol between encode and prefill.
        ec_trust_descriptors: whether descriptors of ec-shared-storage encoders are used.
        use_openai_format: whether encode and prefill get the client's own format (False: tokens in).
        forward_response_headers: response headers sent on later phases, lower-case.
        steps: in order, decode last.
    """

    kv_connector: KvConnector = "kv-shared-storage"
    ec_connector: EcConnector = "ec-shared-storage"
    ec_trust_descriptors: Flag = False
    use_openai_format: Flag = True
    forward_response_headers: tuple[ForwardedHeader, ...] = ("x-llm-d-disagg-revision",)
    steps: tuple[_AnyStep, ...]

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

    def _params(self, kind: type[_ParamsT]) -> _ParamsT | None:
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
