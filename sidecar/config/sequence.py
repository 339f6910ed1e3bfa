"""Which steps may stand together, in which order, and with which KV connector.

Works on the raw values, so that what is wrong is reported together with everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.config.steps import STEP_TYPES
from sidecar.config.values import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sidecar.config.problems import Location

_STEPS: Location = ("pipeline", "steps")
_CONCURRENT = "prefill-decode"
_SEQUENTIAL = ("prefill", "decode")
_CONCURRENT_CONNECTOR = "kv-sglang"

_Finding = tuple["Location", str]


def step_findings(pipeline: Mapping[str, Any]) -> Iterator[_Finding]:
    """What is wrong with the steps of a `pipeline` section, each with its location."""
    steps = pipeline.get("steps")
    if not isinstance(steps, list | tuple):
        if steps is None and pipeline.get("kv_connector") == _CONCURRENT_CONNECTOR:
            yield ("pipeline", "kv_connector"), _needs_concurrent_step()
        return
    yield from _order(steps)
    yield from _last_step(steps)
    yield from _connectors(pipeline, steps)
    yield from _format_needs_render(pipeline, steps)


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping at a key, empty where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _known(steps: Sequence[Any]) -> list[tuple[int, str]]:
    return [
        (index, step["type"])
        for index, step in enumerate(steps)
        if isinstance(step, dict) and isinstance(step.get("type"), str) and step["type"] in STEP_TYPES
    ]


def _order(steps: Sequence[Any]) -> Iterator[_Finding]:
    order = list(STEP_TYPES)
    seen: set[str] = set()
    latest = order[0]
    for index, kind in _known(steps):
        if kind in seen:
            yield (*_STEPS, index), f"{quoted(kind)} is listed twice; remove one of them"
        elif order.index(kind) < order.index(latest):
            text = f"{quoted(kind)} must come before {quoted(latest)}; the order is"
            yield (*_STEPS, index), f"{text} {', '.join(name for name in order if name != _CONCURRENT)}"
        else:
            latest = kind
        seen.add(kind)


def _last_step(steps: Sequence[Any]) -> Iterator[_Finding]:
    kinds = {kind: index for index, kind in _known(steps)}
    if _CONCURRENT not in kinds:
        if "decode" not in kinds:
            yield _STEPS, "the last step is missing; add {type: decode} at the end"
        return
    for kind in _SEQUENTIAL:
        if kind in kinds:
            yield (
                (*_STEPS, kinds[kind]),
                f"{quoted(kind)} is part of {quoted(_CONCURRENT)}; remove one of them",
            )


def _connectors(pipeline: Mapping[str, Any], steps: Sequence[Any]) -> Iterator[_Finding]:
    for index, kind in _known(steps):
        if kind not in (*_SEQUENTIAL, _CONCURRENT):
            continue
        own = section(steps[index], "params").get("kv_connector")
        connector = pipeline.get("kv_connector") if own is None else own
        if kind == _CONCURRENT and connector != _CONCURRENT_CONNECTOR:
            text = f"{quoted(kind)} works with kv_connector {_CONCURRENT_CONNECTOR} only; set it, or use the"
            yield (*_STEPS, index), f"{text} steps prefill and decode"
        elif kind != _CONCURRENT and connector == _CONCURRENT_CONNECTOR:
            # One mistake, however many steps it shows in.
            yield (*_STEPS, index), _needs_concurrent_step()
            return


def _needs_concurrent_step() -> str:
    return (
        f"with {_CONCURRENT_CONNECTOR} prefill answers only while decode runs; list the steps, with "
        f"{{type: {_CONCURRENT}}} in place of prefill and decode"
    )


def _format_needs_render(pipeline: Mapping[str, Any], steps: Sequence[Any]) -> Iterator[_Finding]:
    if any(kind == "render" for _, kind in _known(steps)):
        return
    text = "false needs the token ids of a render step; add one to pipeline.steps, or set it to true"
    if pipeline.get("use_openai_format") is False:
        yield ("pipeline", "use_openai_format"), text
    for index, step in enumerate(steps):
        if isinstance(step, dict) and section(step, "params").get("use_openai_format") is False:
            yield (*_STEPS, index, "params", "use_openai_format"), text
