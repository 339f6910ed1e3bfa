"""Configuration: the settings tree, and how a file and the environment become one."""

from __future__ import annotations

from sidecar.config.describe import describe
from sidecar.config.load import load_settings
from sidecar.config.problems import ConfigError
from sidecar.config.settings import (
    AdminSettings,
    ErrorsSettings,
    ExtProcSettings,
    GatewaySettings,
    HeadersSettings,
    LimitsSettings,
    LogFormat,
    LogLevel,
    ObservabilitySettings,
    PipelineSettings,
    Settings,
)
from sidecar.config.steps import (
    ConditionalDecodeParams,
    DecodeParams,
    EcConnector,
    EncodeParams,
    KvConnector,
    MediaParams,
    MmPayload,
    PrefillDecodeParams,
    PrefillParams,
    RenderParams,
    SparseSpans,
)

__all__ = [
    "AdminSettings",
    "ConditionalDecodeParams",
    "ConfigError",
    "DecodeParams",
    "EcConnector",
    "EncodeParams",
    "ErrorsSettings",
    "ExtProcSettings",
    "GatewaySettings",
    "HeadersSettings",
    "KvConnector",
    "LimitsSettings",
    "LogFormat",
    "LogLevel",
    "MediaParams",
    "MmPayload",
    "ObservabilitySettings",
    "PipelineSettings",
    "PrefillDecodeParams",
    "PrefillParams",
    "RenderParams",
    "Settings",
    "SparseSpans",
    "describe",
    "load_settings",
]
