"""Prometheus metrics of one process.

Labels take only values from fixed sets, never what a client sent: a model name or a path as a label would let
clients grow the process without bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from sidecar.errors import Outcome, Stage

if TYPE_CHECKING:
    from sidecar.limits import InFlightBudget
    from sidecar.observability.record import AccessRecord

_APIS = frozenset({"chat", "completions", "responses", "messages", "generate"})
_OUTCOMES = frozenset(get_args(Outcome))
_STAGES = frozenset(get_args(Stage))
_PREFILL_FORMS = frozenset({"kwargs_data", "mm_metadata", "content_parts", "openai", "tokens"})
_PARITY_PHASES = ("prefill", "decode")
_OTHER = "other"

_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_OVERHEAD_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """All metrics of a process, in a registry of their own.

    Args:
        budget: read for the in-flight gauges whenever somebody scrapes.
        version: version of this program.
    """

    def __init__(self, budget: InFlightBudget, version: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "epd_sidecar_requests",
            'Answered requests; api is "none" for requests that passed through.',
            ("api", "outcome", "stage"),
            registry=self.registry,
        )
        self._steps = Histogram(
            "epd_sidecar_step_duration_seconds",
            "Time of one step of one request.",
            ("step",),
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._overhead = Histogram(
            "epd_sidecar_overhead_seconds",
            "Time of a coordinated request that was not spent waiting for somebody else.",
            buckets=_OVERHEAD_BUCKETS,
            registry=self.registry,
        )
        self._prefill_forms = Counter(
            "epd_sidecar_prefill_form",
            "Prefill sub-requests by the form in which the media travelled.",
            ("form",),
            registry=self.registry,
        )
        self._mismatches = Counter(
            "epd_sidecar_prompt_token_mismatches",
            "Answers of engines that counted other prompt tokens than were rendered.",
            ("phase",),
            registry=self.registry,
        )
        self._comparisons = Counter(
            "epd_sidecar_prompt_token_comparisons",
            "Answers of engines whose prompt tokens were compared with the rendered ones.",
            ("phase",),
            registry=self.registry,
        )
        for phase in _PARITY_PHASES:
            self._mismatches.labels(phase)
            self._comparisons.labels(phase)
        Gauge(
            "epd_sidecar_in_flight_requests", "Coordinated requests being worked on.", registry=self.registry
        ).set_function(lambda: budget.requests)
        Gauge(
            "epd_sidecar_in_flight_bytes",
            "Bytes of client bodies, render answers and media held.",
            registry=self.registry,
        ).set_function(lambda: budget.bytes)
        Info("epd_sidecar_build", "Version of the sidecar.", registry=self.registry).info(
            {"version": version}
        )

    def observe(self, record: AccessRecord) -> None:
        """Count one answered request from its complete access-log record."""
        api = _bounded(record.api, _APIS) if record.api else "none"
        self._requests.labels(api, _bounded(record.outcome, _OUTCOMES), _bounded(record.stage, _STAGES)).inc()
        steps = {
            "media": record.media_ms,
            "render": record.render_ms,
            "encode": record.encode_ms,
            "prefill": record.prefill_ms,
        }
        for step, milliseconds in steps.items():
            if milliseconds is not None:
                self._steps.labels(step).observe(milliseconds / 1000)
        if record.api and record.overhead_ms is not None:
            self._overhead.observe(record.overhead_ms / 1000)
        if record.prefill_form:
            self._prefill_forms.labels(_bounded(record.prefill_form, _PREFILL_FORMS)).inc()

    def prompt_tokens_compared(self, phase: Literal["prefill", "decode"]) -> None:
        """Count one answer whose prompt tokens were compared."""
        self._comparisons.labels(phase).inc()

    def prompt_tokens_differ(self, phase: Literal["prefill", "decode"]) -> None:
        """Count one answer whose prompt tokens are not the rendered ones."""
        self._mismatches.labels(phase).inc()

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of a scrape (Prometheus text format 0.0.4)."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


def _bounded(value: str | None, known: frozenset[str]) -> str:
    return value if value in known else _OTHER
