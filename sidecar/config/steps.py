"""The pipeline steps of the settings tree: types, params, defaults and order."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Tag, model_validator

from sidecar.config.section import Section
from sidecar.config.values import (
    BaseUrl,
    ContentType,
    Count,
    CountOrUnlimited,
    Domain,
    Flag,
    Megabytes,
    Port,
    PositiveDuration,
)

KvConnector = Literal["kv-nixl", "kv-shared-storage", "kv-sglang"]
EcConnector = Literal["ec-nixl", "ec-shared-storage"]
MmPayload = Literal["tensors", "none", "auto"]
OnFailure = Literal["fail", "local"]
SparseSpans = Literal["openai", "verbatim"]


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


class PrefillDecodeParams(Section):
    """Params of `prefill-decode`; what the file leaves out comes from the pipeline and the gateway.

    Attributes:
        timeout: seconds for the reservation, and again for prefill; `gateway.timeout` if not set.
        sparse_spans: how a prompt with mixed-token spans travels.
        use_openai_format: `pipeline.use_openai_format` if not set.
        ec_connector: `pipeline.ec_connector` if not set.
        kv_connector: `pipeline.kv_connector` if not set.
        bootstrap_port: port of the bootstrap server of the prefill workers
            (SGLang's `--disaggregation-bootstrap-port`).
    """

    timeout: PositiveDuration = 60.0
    sparse_spans: SparseSpans = "openai"
    use_openai_format: Flag = True
    ec_connector: EcConnector = "ec-shared-storage"
    kv_connector: KvConnector = "kv-sglang"
    bootstrap_port: Port = 8998


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
    """Hands the rewritten request to Envoy; the last step, unless `prefill-decode` is."""

    type: Literal["decode"]
    params: DecodeParams


class PrefillDecodeStep(_Step):
    """Hands the rewritten request to Envoy beside prefill; the last step, in place of those two."""

    type: Literal["prefill-decode"]
    params: PrefillDecodeParams


Step = (
    MediaStep | RenderStep | ConditionalDecodeStep | EncodeStep | PrefillStep | DecodeStep | PrefillDecodeStep
)

STEP_TYPES: dict[str, type[Step]] = {
    "replace-media-urls": MediaStep,
    "render": RenderStep,
    "conditional-decode": ConditionalDecodeStep,
    "encode": EncodeStep,
    "prefill": PrefillStep,
    "decode": DecodeStep,
    "prefill-decode": PrefillDecodeStep,
}
"""Step classes by type, in the order the pipeline runs them."""

_OPT_IN = frozenset({"conditional-decode", "prefill-decode"})
"""Steps a pipeline has only if the file lists them."""


def _step_type(step: Any) -> str | None:
    kind = step.get("type") if isinstance(step, dict) else getattr(step, "type", None)
    return kind if isinstance(kind, str) else None


# A callable discriminator: the named one prints whatever stands for the type, and a few lines of nested YAML
# aliases take forever to print.
AnyStep = Annotated[
    Annotated[MediaStep, Tag("replace-media-urls")]
    | Annotated[RenderStep, Tag("render")]
    | Annotated[ConditionalDecodeStep, Tag("conditional-decode")]
    | Annotated[EncodeStep, Tag("encode")]
    | Annotated[PrefillStep, Tag("prefill")]
    | Annotated[DecodeStep, Tag("decode")]
    | Annotated[PrefillDecodeStep, Tag("prefill-decode")],
    Discriminator(_step_type),
]

ParamsT = TypeVar("ParamsT", bound=Section)


def default_steps() -> list[dict[str, Any]]:
    """The usual steps without params, as the file would list them."""
    return [{"type": name} for name in STEP_TYPES if name not in _OPT_IN]
