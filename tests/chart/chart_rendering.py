"""Renders the chart with Helm's own engine, and holds what comes out to the Kubernetes API's schemas.

Needs the dependency group `chart`: `make chart` installs it.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python
import jsonschema
import pytest
import referencing
import yaml
from kubernetes_validate.utils import latest_version, schema_contents

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/envoy/chart/epd-sidecar"

RELEASE = "epd"
NAMESPACE = "inference"
NAME = "epd-epd-sidecar"
"""What the chart's objects are called for this release: `<release>-<chart>`."""

SIX_VALUES: dict[str, Any] = {
    "image": {"repository": "registry.example/epd-sidecar"},
    "attach": {"provider": "envoy-gateway", "targetRefs": [{"name": "inference-gateway"}]},
    "phases": {"gateway": {"name": "inference-internal"}},
    "config": {"gateway": {"address": "http://inference-internal.inference.svc.cluster.local:80"}},
    "render": {"address": "http://render.inference.svc.cluster.local:8000"},
}
"""What an installation has to say, and nothing else."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """What one installation consists of.

    Attributes:
        files: rendered text by template, `deployment.yaml` or `attach/istio.yaml`; without NOTES.txt.
        notes: NOTES.txt.
    """

    files: dict[str, str]
    notes: str

    @functools.cached_property
    def documents(self) -> tuple[Document, ...]:
        """Every object, in the order of the templates' names."""
        return tuple(document for name in self.files for document in self.of(name))

    def of(self, template: str) -> tuple[Document, ...]:
        """The objects of one template; none if it rendered to nothing."""
        loaded = yaml.load_all(self.files.get(template, ""), Loader=_StrictLoader)
        return tuple(document for document in loaded if document is not None)

    def all(self, kind: str) -> tuple[Document, ...]:
        """The objects of one kind."""
        return tuple(document for document in self.documents if document["kind"] == kind)

    def one(self, kind: str, name: str | None = None) -> Document:
        """The only object of a kind (with that name)."""
        found = [
            document for document in self.all(kind) if name is None or document["metadata"]["name"] == name
        ]
        assert len(found) == 1, f"{len(found)} objects {kind} {name or ''} among {self.names()}"
        return found[0]

    def names(self) -> list[str]:
        """`Kind/name` of every object."""
        return [f"{document['kind']}/{document['metadata']['name']}" for document in self.documents]


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is written twice, which YAML's usual readers settle in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        assert not twice, f"written twice: {', '.join(sorted(twice))} in{node.start_mark}"
        return super().construct_mapping(node, deep)


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping of several: mappings are merged, all else is replaced by the later one, as Helm does."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict):
                result[key] = merged(result[key], value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def six_values(*overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The six values of an installation with overrides on top."""
    return merged(SIX_VALUES, *overrides)


def render(values: Mapping[str, Any], *, release: str = RELEASE, namespace: str = NAMESPACE) -> Rendered:
    """Render the chart with `values` on top of its own; fails the test when Helm refuses them."""
    prefix = "epd-sidecar/templates/"
    files: dict[str, str] = _chart().render(dict(values), name=release, namespace=namespace)
    rendered = {path.removeprefix(prefix): text for path, text in sorted(files.items())}
    return Rendered(
        {
            path: text
            for path, text in rendered.items()
            if path.endswith(".yaml") and any(document is not None for document in yaml.safe_load_all(text))
        },
        rendered.get("NOTES.txt", ""),
    )


def refusal(values: Mapping[str, Any], *, schema: bool = True, release: str = RELEASE) -> str:
    """What a template's `fail` or `required` says to these values; the test fails if it says nothing.

    Without `schema` values.schema.json is left out, as `helm --skip-schema-validation` does.
    """
    chart = _chart() if schema else _chart_without_schema()
    with pytest.raises(helm_python.HelmRenderError) as raised:
        chart.render(dict(values), name=release, namespace=NAMESPACE)
    return str(raised.value)


def schema_refusal(values: Mapping[str, Any]) -> str:
    """What values.schema.json says to these values; the test fails if it says nothing."""
    with pytest.raises(helm_python.HelmValuesError) as raised:
        _chart().validate_schema(dict(values))
    return str(raised.value)


def lint(values: Mapping[str, Any]) -> list[str]:
    """The errors and warnings of `helm lint` (its remarks are left out)."""
    report: dict[str, Any] = helm_python.lint(CHART, values=dict(values))
    return [f"{item['path']}: {item['error']}" for item in report["messages"] if item["severity"] > 1]


def kubernetes_problems(document: Document) -> list[str]:
    """What the schema of a kind of Kubernetes itself says of an object, unknown fields included.

    Raises:
        FileNotFoundError: the kind is not one of Kubernetes' own.
    """
    api = document["apiVersion"].partition("/")
    group = api[0].partition(".")[0]
    name = f"{document['kind']}-{group}-{api[2]}" if api[1] else f"{document['kind']}-{api[0]}"
    return [
        f"{document['kind']}/{document['metadata']['name']}: {error.json_path}: {error.message}"
        for error in _validator(name.lower()).iter_errors(document)
    ]


def is_kubernetes_own(document: Document) -> bool:
    """Whether the kind is built into Kubernetes (the others come from custom resource definitions)."""
    group = document["apiVersion"].rpartition("/")[0]
    own = ("", "apps", "autoscaling", "policy", "networking.k8s.io")
    return group in own


def strings(value: Any) -> Iterator[str]:
    """Every text inside a document, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


@functools.cache
def _chart() -> Any:
    return helm_python.Chart.load(CHART)


@functools.cache
def _chart_without_schema() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / CHART.name
        shutil.copytree(CHART, copied, ignore=shutil.ignore_patterns("values.schema.json"))
        return helm_python.Chart.load(copied)


@functools.cache
def _validator(name: str) -> Any:
    version = latest_version()
    schema = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{name}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=_definitions())


@functools.cache
def _definitions() -> Any:
    # Two megabytes; kubernetes_validate.validate() reads them again for every object.
    version = latest_version()
    path = f"kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    resource = referencing.Resource.from_contents(schema_contents(path, version))
    return resource @ referencing.Registry()
