"""Metrics: what one answered request adds, and that clients cannot add series."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sidecar.limits import InFlightBudget
from sidecar.observability.metrics import Metrics
from sidecar.observability.record import AccessRecord

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Metrics) -> Series:
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_answered_request() -> None:
    """A request counts once, its steps and overhead in seconds, its prefill form by name."""
    metrics = Metrics(InFlightBudget(10, 100), "1.2.3")
    metrics.observe(
        AccessRecord(
            api="chat",
            outcome="ok",
            stage="decode",
            prefill_form="mm_metadata",
            render_ms=250.0,
            encode_ms=1500.0,
            prefill_ms=90.0,
            overhead_ms=4.0,
        )
    )
    found = series(metrics)
    assert value(found, "epd_sidecar_requests_total", api="chat", outcome="ok", stage="decode") == 1
    assert value(found, "epd_sidecar_step_duration_seconds_sum", step="render") == 0.25
    assert value(found, "epd_sidecar_step_duration_seconds_sum", step="encode") == 1.5
    assert value(found, "epd_sidecar_step_duration_seconds_count", step="prefill") == 1
    assert ("epd_sidecar_step_duration_seconds_count", frozenset({("step", "media")})) not in found
    assert value(found, "epd_sidecar_overhead_seconds_sum") == 0.004
    assert value(found, "epd_sidecar_prefill_form_total", form="mm_metadata") == 1
    assert value(found, "epd_sidecar_build_info", version="1.2.3") == 1


def test_passthrough_counts_without_overhead() -> None:
    """Passing a request through is counted, but does not blur the overhead of coordinated requests."""
    metrics = Metrics(InFlightBudget(1, 1), "1")
    metrics.observe(AccessRecord(outcome="passthrough", stage="decode", overhead_ms=0.1))
    found = series(metrics)
    assert value(found, "epd_sidecar_requests_total", api="none", outcome="passthrough", stage="decode") == 1
    assert value(found, "epd_sidecar_overhead_seconds_count") == 0


def test_an_answer_a_worker_served_at_once() -> None:
    """A hit of conditional-decode is an outcome and a stage of its own."""
    metrics = Metrics(InFlightBudget(1, 1), "1")
    metrics.observe(AccessRecord(api="chat", outcome="served", stage="conditional_decode"))
    labels = {"api": "chat", "outcome": "served", "stage": "conditional_decode"}
    assert value(series(metrics), "epd_sidecar_requests_total", **labels) == 1


def test_prompt_token_mismatches() -> None:
    """Both phases are there from the start, and each counts its own."""
    metrics = Metrics(InFlightBudget(1, 1), "1")
    name = "epd_sidecar_prompt_token_mismatches_total"
    found = series(metrics)
    assert (value(found, name, phase="prefill"), value(found, name, phase="decode")) == (0, 0)
    metrics.prompt_tokens_differ("decode")
    metrics.prompt_tokens_compared("prefill")
    found = series(metrics)
    assert (value(found, name, phase="prefill"), value(found, name, phase="decode")) == (0, 1)
    name = "epd_sidecar_prompt_token_comparisons_total"
    assert (value(found, name, phase="prefill"), value(found, name, phase="decode")) == (1, 0)


def test_in_flight_gauges_follow_the_budget() -> None:
    """The gauges show the budget at the time of the scrape."""
    budget = InFlightBudget(10, 1000)
    metrics = Metrics(budget, "1")
    with budget.admit() as ticket:
        ticket.reserve(300)
        found = series(metrics)
        assert value(found, "epd_sidecar_in_flight_requests") == 1
        assert value(found, "epd_sidecar_in_flight_bytes") == 300
    found = series(metrics)
    assert value(found, "epd_sidecar_in_flight_requests") == 0
    assert value(found, "epd_sidecar_in_flight_bytes") == 0


@settings(deadline=None)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=30))
def test_labels_are_bounded(names: list[str]) -> None:
    """Whatever strings end up in a record, the number of series does not grow."""
    metrics = Metrics(InFlightBudget(1, 1), "1")
    metrics.observe(AccessRecord(api="x-unknown", prefill_form="x-unknown"))
    metrics.observe(AccessRecord())
    before = series(metrics).keys()
    for name in names:
        metrics.observe(AccessRecord(api=f"x{name}", model=name, request_id=name, prefill_form=f"x{name}"))
    assert series(metrics).keys() == before


def test_two_instances_do_not_share() -> None:
    """Each process object has its own registry: no clash, no shared counts."""
    first, second = Metrics(InFlightBudget(1, 1), "1"), Metrics(InFlightBudget(1, 1), "1")
    first.observe(AccessRecord(api="chat", outcome="ok", stage="decode"))
    assert not any(name == "epd_sidecar_requests_total" for name, _ in series(second))
