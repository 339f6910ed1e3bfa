"""Writes the chart's templates/_config_forms.tpl: which form each value below `config` has.

    python -m deploy.envoy.chart.config_forms

The forms are templates in templates/_forms.tpl, with the rules and the words of `sidecar.config.values`: the
chart refuses what the sidecar would refuse at its start, in the same words. Kinds and choices are the
schema's, see `config_schema`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from sidecar.config import Settings, values
from sidecar.config.section import Section
from sidecar.config.steps import STEP_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = Path(__file__).parent / "epd-sidecar/templates/_config_forms.tpl"

_FORMS: list[tuple[object, str]] = [
    (values.Duration, "duration"),
    (values.PositiveDuration, "positiveDuration"),
    (values.Megabytes, "megabytes"),
    (values.Count, "count"),
    (values.CountOrUnlimited, "countOrUnlimited"),
    (values.Port, "port"),
    (values.ListenAddress, "listenAddress"),
    (values.AdminAddress, "adminAddress"),
    (values.BaseUrl, "baseUrl"),
    (values.StrippedHeader, "strippedHeader"),
    (values.ForwardedHeader, "forwardedHeader"),
    (values.ContentType, "contentType"),
    (values.Domain, "domain"),
    (values.Namespace, "metadataNamespace"),
]
"""Templates for the value types of `sidecar.config.values`."""

_KINDS_ONLY: list[object] = [values.Flag, values.PhaseToken]
"""Types without a form here. A phase token is in a Secret, which the chart does not see."""

_HEAD = """{{/*
deploy/envoy/chart/config_forms.py writes this file from the sidecar's settings. Dotted paths below `config`,
and the form of _forms.tpl that each value has; [] stands for the items of a list.
*/}}
"""


def template_text() -> str:
    """templates/_config_forms.tpl as it should be."""
    steps = {name: dict(_forms(get_type_hints(step)["params"])) for name, step in STEP_TYPES.items()}
    headers = {
        # The parsers decide by these; what they say of single names is not enough to list them.
        "untouchable": sorted(values._UNTOUCHABLE_HEADERS),  # noqa: SLF001 - the comment above
        "envoyPrefixes": sorted(values._ENVOY_PREFIXES),  # noqa: SLF001 - as above
        "credentials": sorted(values._CREDENTIAL_HEADERS),  # noqa: SLF001 - as above
        "control": sorted(values._CONTROL_HEADERS),  # noqa: SLF001 - as above
    }
    return "".join(
        [
            _HEAD,
            _definition("forms", dict(_forms(Settings))),
            _definition("stepForms", {name: forms for name, forms in steps.items() if forms}),
            _definition("order", list(STEP_TYPES)),
            _definition("headers", headers),
        ]
    )


def _definition(name: str, content: Any) -> str:
    text = yaml.safe_dump(content, sort_keys=False, width=110)
    return f'\n{{{{- define "epd-sidecar.config.{name}" -}}}}\n{text}{{{{- end -}}}}\n'


def _forms(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    kinds = get_type_hints(section, include_extras=True)
    for name in section.model_fields:
        kind, path = _required(kinds[name]), prefix + name
        if get_origin(kind) is tuple:
            kind, path = get_args(kind)[0], f"{path}[]"
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _forms(kind, f"{path}.")
        form = next((form for known, form in _FORMS if kind == known), None)
        if form:
            yield path, form
        elif hasattr(kind, "__metadata__") and kind not in _KINDS_ONLY and not _is_choice(kind):
            raise TypeError(f"no form for {kind!r} of {path}; add it to _FORMS")


def _is_choice(kind: Any) -> bool:
    """One of several words, or of several types of steps: the schema lists them."""
    return get_origin(get_args(kind)[0]) in (Literal, Union)


def _required(kind: Any) -> Any:
    """The type of a value that may be left out."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and arguments[1:] == (NoneType,):
        return arguments[0]
    return kind


if __name__ == "__main__":
    TEMPLATE.write_text(template_text(), encoding="utf-8")
    sys.stdout.write(f"{TEMPLATE} written\n")
