"""The pages in docs/deploy say what the chart does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import control_headers
from sidecar.control_headers import HOP_GUARD, ControlHeaders
from tests.chart.attach_cases import PARITY, PREFILL_DECODE, PROVIDERS, Case, case
from tests.chart.attach_schemas import problems
from tests.chart.chart_rendering import (
    CHART,
    ROOT,
    Rendered,
    is_kubernetes_own,
    lint,
    merged,
    refusal,
    render,
    six_values,
)

DOCS = ROOT / "docs"
DEPLOY = DOCS / "deploy.md"
PAGES = sorted((DOCS / "deploy").glob("*.md"))
every_provider = pytest.mark.parametrize("provider", PROVIDERS)

TITLES = {
    "envoy-gateway": "Envoy Gateway",
    "istio": "Istio",
    "kgateway": "kgateway",
    "agentgateway": "agentgateway",
    "gke": "GKE",
}
"""Headings of the table of differences."""


def text_of(provider: str) -> str:
    return (DOCS / f"deploy/{provider}.md").read_text(encoding="utf-8")


def yaml_of(text: str) -> list[Any]:
    """Every YAML document of a page."""
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def values_of(provider: str) -> dict[str, Any]:
    """The six values of a page."""
    (values,) = (document for document in yaml_of(text_of(provider)) if "attach" in document)
    return dict(values)


def installed(provider: str) -> Rendered:
    return render(values_of(provider))


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a page's tables, without their separators."""
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


@every_provider
def test_the_six_values_install(provider: str) -> None:
    """The values of a page are complete: they render, valid, without a word of the linter."""
    values = values_of(provider)
    assert values["attach"]["provider"] == provider
    assert lint(values) == []
    foreign = [document for document in installed(provider).documents if not is_kubernetes_own(document)]
    assert [problem for document in foreign for problem in problems(document)] == []
    six = {"image", "attach", "phases", "config", "render"}
    assert set(values) - six == ({"tls"} if provider == "gke" else set())


@every_provider
def test_the_page_lists_what_is_created(provider: str) -> None:
    """The table has every object of the gateway's API, and no other."""
    listed = {(kind, name) for kind, name, _ in rows(section(text_of(provider), "What is created"))[1:]}
    created = {
        (document["kind"], document["metadata"]["name"])
        for document in installed(provider).documents
        if not is_kubernetes_own(document)
    }
    assert listed == created


@every_provider
def test_the_internal_gateway_of_the_page_is_the_one_of_its_values(provider: str) -> None:
    """The Gateway that is made before has the name, and a Service inside the cluster."""
    documents = yaml_of(text_of(provider))
    (gateway,) = (document for document in documents if document.get("kind") == "Gateway")
    assert gateway["metadata"]["name"] == values_of(provider)["phases"]["gateway"]["name"]
    assert ("ClusterIP" in text_of(provider)) == (provider != "gke")
    parameters = gateway["spec"].get("infrastructure", {}).get("parametersRef")
    if parameters:
        kinds = {document["kind"]: document for document in documents if "kind" in document}
        named = kinds[parameters["kind"]]
        assert named["metadata"]["name"] == parameters["name"]
        assert named["apiVersion"].startswith(parameters["group"])


@every_provider
def test_the_page_says_what_was_not_run(provider: str) -> None:
    """Nobody takes a page for a tested installation, and each has the same parts."""
    text = text_of(provider)
    assert re.search(r"^Not run (against a control plane|on Google Cloud)", text, re.MULTILINE)
    for title in ("Before", "The six values", "What is created", "The access log", "Verify", "Roll back"):
        assert section(text, title), title


@every_provider
def test_names_in_commands_exist(provider: str) -> None:
    """Names of objects in commands exist in the installation of the page."""
    names = {document["metadata"]["name"] for document in installed(provider).documents}
    # epd-epd-sidecar.inference.svc is a host, not an object in another namespace.
    mentioned = set(re.findall(r"\bepd-epd-sidecar[a-z0-9-]*(?:\.inference\b(?!\.svc))?", text_of(provider)))
    assert mentioned <= names


def differences() -> dict[str, dict[str, str]]:
    """The table of differences: row -> provider -> cell."""
    table = DEPLOY.read_text(encoding="utf-8").partition("What the gateways can express differs:")[2]
    head, *body = rows(table.partition("\n## ")[0])
    order = [next(name for name, title in TITLES.items() if title == cell) for cell in head[1:]]
    return {row[0]: dict(zip(order, row[1:], strict=True)) for row in body}


def works(provider: str, overrides: dict[str, Any]) -> bool:
    """Whether the chart installs it."""
    values = six_values(case(provider).values, overrides)
    try:
        refusal(values)
    except pytest.fail.Exception:
        return True
    return False


STREAMED = {
    "config": {
        "pipeline": {
            "steps": [
                {"type": name} for name in ("render", "conditional-decode", "encode", "prefill", "decode")
            ]
        }
    }
}


@every_provider
def test_the_table_of_differences_is_what_the_chart_does(provider: str) -> None:
    """What it denies is refused, and what it grants is installed."""
    said = {row: cells[provider] for row, cells in differences().items()}
    assert ("HTTPRoute" in said["targets"]) == (not Case(provider, kind="HTTPRoute", tls=True).refused_for)
    assert said["`Buffered`"].startswith("no") != works(provider, {"attach": {"bodyMode": "Buffered"}})
    assert (said["the step `prefill-decode`"] == "no") != works(provider, PREFILL_DECODE)
    assert (said["the step `conditional-decode`"] == "no") != works(provider, STREAMED)
    assert (said["`prompt_token_parity: warn`"] == "no") != works(provider, PARITY)
    notes = render(case(provider).values).notes
    logged = said["the record in the gateway's access log"] == "yes"
    assert logged != ("does not\n   reach the log" in notes)
    hours = {"config": {"ext_proc": {"request_deadline": "720h"}}}
    longest = said["longest `request_deadline` (with `Buffered` 59m50s)"]
    assert (longest == "720 h") == works(provider, hours)
    shared = six_values(
        case(provider, "shared-listener").values, {"phases": {"decode": {"kind": "InferencePool"}}}
    )
    pools = said["an InferencePool of decode with `shared-listener`"]
    assert pools.startswith("no") != works(provider, shared)


def test_detaching_leaves_only_the_phases() -> None:
    """The command of the roll-back takes filter, policies and the clients' route away together."""
    assert "--set attach.provider=none" in DEPLOY.read_text(encoding="utf-8")
    for provider in PROVIDERS:
        left = render(merged(values_of(provider), {"attach": {"provider": "none"}}))
        foreign = [document for document in left.documents if not is_kubernetes_own(document)]
        assert [document["metadata"]["name"] for document in foreign] == ["epd-epd-sidecar-phases"]


def test_the_route_without_the_sidecar_is_that_of_clients() -> None:
    """The same paths of the same Gateway, in its namespace, to decode, for as long as answers take."""
    (route,) = yaml_of(DEPLOY.read_text(encoding="utf-8"))
    assert problems(route) == []
    clients = installed("istio").one("HTTPRoute", "epd-epd-sidecar-clients")
    assert route["metadata"]["namespace"] == clients["metadata"]["namespace"]
    assert [parent["name"] for parent in clients["spec"]["parentRefs"]] == [
        parent["name"] for parent in route["spec"]["parentRefs"]
    ]
    (rule,), (theirs,) = route["spec"]["rules"], clients["spec"]["rules"]
    assert rule["matches"] == theirs["matches"]
    assert rule["timeouts"]["request"] == theirs["timeouts"]["request"] == "0s"
    assert rule["backendRefs"] == [{"name": "decode", "port": 8000}]


def test_the_route_without_the_sidecar_removes_every_control_header() -> None:
    """Nothing else removes them once the filter is gone; the hop guard means nothing without it."""
    (route,) = yaml_of(DEPLOY.read_text(encoding="utf-8"))
    (modifier,) = route["spec"]["rules"][0]["filters"]
    removed = modifier["requestHeaderModifier"]["remove"]
    assert set(control_headers._NAMES) | {HOP_GUARD} <= set(removed)
    assert set(removed) - {HOP_GUARD} == set(ControlHeaders().among(removed))
    assert sum(name.startswith(control_headers._PREFIX) for name in removed) == 3


def commands(text: str) -> list[str]:
    """The commands of a page's shell blocks, each in one line."""
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [" ".join(line.split()) for line in blocks.splitlines() if line]


GATEWAY_PAGES = [DEPLOY, *(page for page in PAGES if page.stem != "plain-envoy")]
every_page = pytest.mark.parametrize("page", GATEWAY_PAGES, ids=lambda page: page.stem)


@every_page
def test_every_command_says_where(page: Path) -> None:
    """Each has the namespace of the example, or all of them, and no placeholder for it or for the release."""
    found = commands(page.read_text(encoding="utf-8"))
    assert found
    for command in found:
        if re.search(r"\b(kubectl (get|logs|patch|create)|helm (install|upgrade|test|template)) ", command):
            where = re.search(r" (-n|--namespace) (inference|envoy-gateway-system)\b| -A ", command)
            assert where or command.startswith("kubectl explain"), command
        assert not re.search(r"\b(RELEASE|NS|GATEWAY|INTERNAL)\b", command), command


@every_page
def test_commands_show_what_the_page_tells_to_look_for(page: Path) -> None:
    """Conditions are printed with reason and message; logs are of every pod; nothing is cut out of YAML."""
    for command in commands(page.read_text(encoding="utf-8")):
        assert "-o yaml" not in command, command
        if "conditions" in command:
            assert "{.type}={.status} {.reason}: {.message}" in command
        if command.startswith("kubectl logs"):
            assert " -l " in command, command
            assert " --tail=" in command, command


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "istio"])
def test_the_notes_and_the_page_have_the_same_command(provider: str) -> None:
    """What `helm install` prints is what the page explains; Istio writes no conditions for an EnvoyFilter."""
    page = next(line for line in commands(text_of(provider)) if "conditions" in line)
    notes = " ".join(installed(provider).notes.replace("\\\n", " ").split())
    assert page in notes


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tls": {"existingSecret": "certificate"}, "attach": {"tls": {"caSecret": "ca"}}}],
    ids=["plaintext", "TLS"],
)
def test_the_configuration_can_be_checked_before_it_is_installed(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    """The commands of the page, with Helm's output in a file: there is no `helm` to run here."""
    block = next(
        block
        for block in re.findall(r"```sh\n(.*?)```", DEPLOY.read_text(encoding="utf-8"), re.DOTALL)
        if "check-config" in block
    )
    template, behind = block.split("|", 1)
    assert "-s templates/configmap.yaml" in template
    rendered = render(merged(values_of("istio"), overrides)).files["configmap.yaml"]
    (tmp_path / "configmap.yaml").write_text(rendered, encoding="utf-8")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    done = subprocess.run(
        ["/bin/bash", "-e", "-o", "pipefail", "-c", f"cat configmap.yaml |{behind}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (
        yaml.safe_load(done.stdout)["gateway"]["address"]
        == values_of("istio")["config"]["gateway"]["address"]
    )


def test_the_chart_s_own_example_installs() -> None:
    """The README's values are complete, and lead to where that gateway puts the internal Service."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    (values,) = yaml_of(text)
    assert lint(values) == []
    assert values["config"] == values_of(values["attach"]["provider"])["config"]
    assert values["render"] == values_of(values["attach"]["provider"])["render"]
    for command in commands(text):
        assert "--namespace inference" in command, command


def test_the_page_says_what_it_takes() -> None:
    """The versions of Kubernetes and Helm stand where one begins to read, and are the chart's."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    (kubernetes,) = re.findall(r">=(\d+\.\d+)\.", chart["kubeVersion"])
    for page in (DEPLOY, CHART / "README.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"Kubernetes {kubernetes}" in text
        assert "Helm 3.18 or newer" in text


def test_the_alerts_are_the_chart_s() -> None:
    """Names of alerts in the documentation are those of the PrometheusRule."""
    rule = (CHART / "templates/prometheusrule.yaml").read_text(encoding="utf-8")
    defined = set(re.findall(r"alert: (\w+)", rule))
    assert set(re.findall(r"`(EpdSidecar\w+)`", DEPLOY.read_text(encoding="utf-8"))) == defined


@pytest.mark.parametrize("page", [DEPLOY, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file, and every anchor a heading of it."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, (
                target
            )


def test_every_gateway_has_its_page() -> None:
    """One page per provider, and that of plain Envoy."""
    assert {page.stem for page in PAGES} == {*PROVIDERS, "plain-envoy"}
