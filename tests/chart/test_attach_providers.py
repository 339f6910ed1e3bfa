"""What each gateway is told, in the words of its own API."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.envoy.local_stack import load_bootstrap
from sidecar.observability.record import AccessRecord
from tests.chart.attach_cases import (
    CLIENTS,
    PARITY,
    PREFILL_DECODE,
    PROVIDERS,
    TOPOLOGIES,
    Case,
    case,
    rendered,
    rendered_with,
)
from tests.chart.chart_rendering import NAME
from tests.e2e.e2e_stack import manager

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Document, Rendered

RECORD = [item.name for item in fields(AccessRecord)]
SERVICE = {"group": "", "kind": "Service", "name": NAME, "port": 9002}
SERVER = f"{NAME}.inference.svc"
TRUSTED = {"attach": {"tls": {"caConfigMap": "sidecar-ca"}}}
GATEWAY = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": CLIENTS}


def shipped_log() -> dict[str, str]:
    """The access-log keys of the shipped bootstrap."""
    bootstrap = load_bootstrap("bootstrap.yaml", {}, Path("/dev/stdout"))
    (log,) = manager(bootstrap, "external")["access_log"]
    found: dict[str, str] = log["typed_config"]["log_format"]["json_format"]
    return found


def with_tls(provider: str, **more: Any) -> Rendered:
    return rendered_with(provider, Case(provider, tls=True).values, TRUSTED, more)


def policy(objects: Rendered, part: str) -> Document:
    """The only AgentgatewayPolicy whose spec has `a.b`."""
    outer, inner = part.split(".")
    (found,) = (item for item in objects.all("AgentgatewayPolicy") if inner in item["spec"].get(outer, {}))
    return found


def ext_proc(objects: Rendered) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = objects.one("EnvoyExtensionPolicy")["spec"]["extProc"]
    return found


def extension(objects: Rendered) -> dict[str, Any]:
    (chain,) = objects.one("GCPRoutingExtension")["spec"]["extensionChains"]
    (found,) = chain["extensions"]
    return dict(found)


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name not in ("istio", "gke")])
@pytest.mark.parametrize(("kind", "target"), [("Gateway", CLIENTS), ("HTTPRoute", "chat")])
def test_the_filter_is_attached_where_values_say(provider: str, kind: str, target: str) -> None:
    """Targets keep their kind and section; the listeners' policies always name Gateways."""
    objects = rendered(Case(provider, kind=kind))
    names = {"envoy-gateway": "EnvoyExtensionPolicy", "kgateway": "TrafficPolicy"}
    attached = (
        policy(objects, "traffic.extProc") if provider == "agentgateway" else objects.one(names[provider])
    )
    expected = [{"group": "gateway.networking.k8s.io", "kind": kind, "name": target}]
    assert attached["spec"]["targetRefs"] == expected
    listeners = {
        "envoy-gateway": lambda: objects.one("ClientTrafficPolicy", NAME),
        "kgateway": lambda: objects.one("ListenerPolicy", NAME),
        "agentgateway": lambda: policy(objects, "frontend.accessLog"),
    }
    assert listeners[provider]()["spec"]["targetRefs"] == [GATEWAY]


def test_several_targets_are_all_attached() -> None:
    """Sections are kept, and a policy that takes whole Gateways only names each once."""
    targets = [
        {"name": CLIENTS, "sectionName": "a"},
        {"name": CLIENTS, "sectionName": "b"},
        {"name": "other"},
    ]
    objects = rendered_with("agentgateway", {"attach": {"targetRefs": targets}})
    refs = policy(objects, "traffic.extProc")["spec"]["targetRefs"]
    assert [(ref["name"], ref.get("sectionName")) for ref in refs] == [
        (CLIENTS, "a"),
        (CLIENTS, "b"),
        ("other", None),
    ]
    refs = policy(objects, "frontend.accessLog")["spec"]["targetRefs"]
    assert refs == [GATEWAY, {**GATEWAY, "name": "other"}]


def test_envoy_gateway_s_filter() -> None:
    """Full duplex, closed, 503 when the sidecar is down, and a namespace for the record."""
    (ours,) = ext_proc(rendered(case("envoy-gateway")))
    assert ours == {
        "backendRefs": [SERVICE],
        "backendSettings": {
            "circuitBreaker": {
                "maxConnections": 100000,
                "maxPendingRequests": 100000,
                "maxParallelRequests": 100000,
            }
        },
        "failOpen": False,
        "statusOnError": 503,
        "messageTimeout": "130s",
        "processingMode": {"request": {"body": "FullDuplexStreamed"}},
        "metadata": {"writableNamespaces": ["epd.sidecar"]},
    }


def test_envoy_gateway_s_observer() -> None:
    """The second filter reads answers and the record, and holds nothing up."""
    ours, observer = ext_proc(rendered_with("envoy-gateway", PARITY))
    assert "shadowMode" not in ours
    assert observer["shadowMode"] is True
    assert observer["backendRefs"] == ours["backendRefs"]
    assert observer["processingMode"] == {"response": {"body": "Streamed"}}
    assert observer["metadata"] == {"accessibleNamespaces": ["epd.sidecar"]}


def test_envoy_gateway_merges_into_the_gateway_s_policy_if_asked() -> None:
    """`mergeType` is written for HTTPRoutes only."""
    routes = Case("envoy-gateway", kind="HTTPRoute").values
    merging = {"attach": {"envoyGateway": {"mergeType": "StrategicMerge"}}}
    objects = rendered_with("envoy-gateway", routes, merging)
    assert objects.one("EnvoyExtensionPolicy")["spec"]["mergeType"] == "StrategicMerge"
    assert "mergeType" not in rendered(case("envoy-gateway")).one("EnvoyExtensionPolicy")["spec"]


def test_envoy_gateway_s_proxy_keeps_what_its_class_says() -> None:
    """A Gateway's EnvoyProxy would replace that of the GatewayClass as a whole: Service, replicas and all."""
    spec = rendered(case("envoy-gateway")).one("EnvoyProxy")["spec"]
    assert spec["mergeType"] == "StrategicMerge"
    assert set(spec) == {"mergeType", "telemetry"}


def test_envoy_gateway_s_listeners() -> None:
    """Paths are read as the workers read them, ids kept, and nothing ends a silent generation."""
    objects = rendered(case("envoy-gateway"))
    for name, refs in ((NAME, CLIENTS), (f"{NAME}-internal", "inference-internal")):
        spec = objects.one("ClientTrafficPolicy", name)["spec"]
        assert spec["targetRefs"] == [{**GATEWAY, "name": refs}]
        assert spec["timeout"]["http"]["streamIdleTimeout"] == "900s"
        assert spec["http1"]["enableTrailers"] is True
        assert spec["headers"]["requestID"] == "PreserveOrGenerate"
        assert spec["connection"]["bufferLimit"] == 1048576
    assert objects.one("ClientTrafficPolicy", NAME)["spec"]["path"] == {
        "escapedSlashesAction": "RejectRequest"
    }


@pytest.mark.parametrize("provider", ["envoy-gateway", "kgateway"])
def test_the_buffered_mode_takes_bodies_up_to_the_sidecar_s_limit(provider: str) -> None:
    """The clients' listeners buffer the largest body, and 1 MiB more; the internal one buffers nothing."""
    objects = rendered_with(
        provider,
        {"attach": {"bodyMode": "Buffered"}, "config": {"ext_proc": {"max_request_body_size": 2}}},
    )
    kind = {"envoy-gateway": "ClientTrafficPolicy", "kgateway": "ListenerPolicy"}[provider]

    def limit(name: str) -> Any:
        spec = objects.one(kind, name)["spec"]
        if provider == "envoy-gateway":
            return spec["connection"]["bufferLimit"]
        return spec["default"]["perConnectionBufferLimitBytes"]

    assert limit(NAME) == 3 << 20
    assert limit(f"{NAME}-internal") == 1 << 20


def test_envoy_gateway_s_access_log() -> None:
    """The shipped keys, with the name that Envoy Gateway gives the filter."""
    (setting,) = rendered(case("envoy-gateway")).one("EnvoyProxy")["spec"]["telemetry"]["accessLog"][
        "settings"
    ]
    filter_ = f"envoy.filters.http.ext_proc/envoyextensionpolicy/inference/{NAME}/extproc/0"
    assert setting["format"]["json"] == shipped_log() | {"ext_proc": f"%FILTER_STATE({filter_}:PLAIN)%"}
    assert setting["sinks"] == [{"type": "File", "file": {"path": "/dev/stdout"}}]


def test_another_metadata_namespace_is_allowed_and_read() -> None:
    """`observability.metadata_namespace` reaches the filter's permission and the log alike."""
    other = {"config": {"observability": {"metadata_namespace": "acme.epd"}}}
    objects = rendered_with("envoy-gateway", other)
    assert ext_proc(objects)[0]["metadata"] == {"writableNamespaces": ["acme.epd"]}
    (setting,) = objects.one("EnvoyProxy")["spec"]["telemetry"]["accessLog"]["settings"]
    assert setting["format"]["json"]["outcome"] == "%DYNAMIC_METADATA(acme.epd:outcome)%"
    istio = json.dumps(rendered_with("istio", other).one("EnvoyFilter", NAME))
    assert '{"untyped": ["acme.epd"]}' in istio
    assert "epd.sidecar:" not in istio
    attributes = policy(rendered_with("agentgateway", other), "frontend.accessLog")
    assert 'extproc["acme.epd"]["outcome"]' in json.dumps(attributes).replace("\\", "")


def test_kgateway_s_filter() -> None:
    """Full duplex, closed against the API's own default, and the sidecar says when to route again."""
    objects = rendered(case("kgateway"))
    assert objects.one("GatewayExtension")["spec"]["extProc"] == {
        "grpcService": {"backendRef": SERVICE},
        "failOpen": False,
        "messageTimeout": "130s",
        "statPrefix": "epd_sidecar",
        "routeCacheAction": "FromResponse",
        "processingMode": {
            "requestHeaderMode": "SEND",
            "requestBodyMode": "FULL_DUPLEX_STREAMED",
            "requestTrailerMode": "SEND",
            "responseHeaderMode": "SKIP",
            "responseBodyMode": "NONE",
            "responseTrailerMode": "SKIP",
        },
    }
    assert objects.one("TrafficPolicy")["spec"]["extProc"] == {"extensionRef": {"name": NAME}}


def test_kgateway_s_access_log_has_what_leads_to_the_record() -> None:
    """The record does not reach it; Envoy's own keys do, and the id that the sidecar's log has, too."""
    settings = rendered(case("kgateway")).one("ListenerPolicy", NAME)["spec"]["default"]["httpSettings"]
    (sink,) = settings["accessLog"]
    own = {key: value for key, value in shipped_log().items() if key not in RECORD and key != "ext_proc"}
    assert sink["fileSink"] == {
        "path": "/dev/stdout",
        "jsonFormat": own | {"request_id": "%REQ(X-REQUEST-ID)%"},
    }


def test_agentgateway_s_filter() -> None:
    """Full duplex and closed; on a shared listener before routing, which needs the phase."""
    filters = [
        policy(rendered(case("agentgateway", topology)), "traffic.extProc")["spec"]["traffic"]
        for topology in TOPOLOGIES
    ]
    assert filters[0]["extProc"] == filters[1]["extProc"]
    assert filters[0]["extProc"] == {
        "backendRef": SERVICE,
        "failureMode": "FailClosed",
        "processingOptions": {
            "requestHeaderMode": "Send",
            "requestBodyMode": "FullDuplexStreamed",
            "requestTrailerMode": "Send",
            "responseHeaderMode": "Skip",
            "responseBodyMode": "None",
            "responseTrailerMode": "Skip",
        },
    }
    assert [traffic.get("phase") for traffic in filters] == [None, "PreRouting"]


def test_agentgateway_s_access_log_has_the_record() -> None:
    """Each key of the record is read from the sidecar's metadata."""
    attributes = policy(rendered(case("agentgateway")), "frontend.accessLog")["spec"]["frontend"]["accessLog"]
    assert attributes == {
        "attributes": {
            "add": [{"name": key, "expression": f'extproc["epd.sidecar"]["{key}"]'} for key in RECORD]
        }
    }


def test_gke_s_filter() -> None:
    """Before routing, over TLS, closed, with the three events that full duplex takes."""
    assert extension(rendered(case("gke"))) == {
        "name": "epd-sidecar",
        "authority": SERVER,
        "timeout": "10s",
        "failOpen": False,
        "supportedEvents": ["RequestHeaders", "RequestBody", "RequestTrailers"],
        "requestBodySendMode": "FullDuplexStreamed",
        "backendRef": SERVICE,
    }


def test_gke_asks_the_sidecar_s_readiness() -> None:
    """The load balancer's check is the admin port's /readyz: its gRPC check speaks no TLS."""
    health = rendered(case("gke")).one("HealthCheckPolicy", NAME)["spec"]
    assert health["targetRef"] == {"group": "", "kind": "Service", "name": NAME}
    assert health["default"]["config"] == {
        "type": "HTTP",
        "httpHealthCheck": {
            "portSpecification": "USE_FIXED_PORT",
            "port": 9090,
            "requestPath": "/readyz",
        },
    }


@pytest.mark.parametrize(
    ("provider", "plain", "asked"),
    [
        ("envoy-gateway", None, {}),
        ("istio", "SKIP", "SEND"),
        ("kgateway", "SKIP", "SEND"),
        ("agentgateway", "Skip", "Send"),
    ],
)
def test_prefill_decode_sees_the_answer_s_headers(provider: str, plain: Any, asked: Any) -> None:
    """Only with that step does the answer's head pass the sidecar, and never its body."""

    def mode(objects: Rendered) -> Any:
        match provider:
            case "envoy-gateway":
                return ext_proc(objects)[0]["processingMode"].get("response")
            case "istio":
                patches = objects.one("EnvoyFilter", NAME)["spec"]["configPatches"]
                processing = patches[0]["patch"]["value"]["typed_config"]["processing_mode"]
                assert processing["response_body_mode"] == "NONE"
                return processing["response_header_mode"]
            case "kgateway":
                processing = objects.one("GatewayExtension")["spec"]["extProc"]["processingMode"]
                assert processing["responseBodyMode"] == "NONE"
                return processing["responseHeaderMode"]
            case _:
                options = policy(objects, "traffic.extProc")["spec"]["traffic"]["extProc"][
                    "processingOptions"
                ]
                assert options["responseBodyMode"] == "None"
                return options["responseHeaderMode"]

    assert mode(rendered(case(provider))) == plain
    assert mode(rendered_with(provider, PREFILL_DECODE)) == asked


@pytest.mark.parametrize(
    ("deadline", "message", "idle"),
    [("120s", 130, 900), ("1m30s", 100, 900), ("20m", 1210, 1210), ("500ms", 11, 900)],
)
def test_timeouts_stay_above_the_sidecar_s_own(deadline: str, message: int, idle: int) -> None:
    """The sidecar's deadline ends a request before Envoy's timeouts do."""
    values = {"config": {"ext_proc": {"request_deadline": deadline}}}
    objects = rendered_with("envoy-gateway", values)
    assert ext_proc(objects)[0]["messageTimeout"] == f"{message}s"
    for listener in objects.all("ClientTrafficPolicy"):
        assert listener["spec"]["timeout"]["http"]["streamIdleTimeout"] == f"{idle}s"
    extension_ = rendered_with("kgateway", values).one("GatewayExtension")
    assert extension_["spec"]["extProc"]["messageTimeout"] == f"{message}s"


@pytest.mark.parametrize("provider", ["envoy-gateway", "kgateway"])
@pytest.mark.parametrize("trusted", [False, True])
def test_tls_is_verified_by_a_policy_of_the_gateway_api(provider: str, trusted: bool) -> None:
    """By the CA that values name, or by the gateway's own; always by the certificate's name."""
    objects = with_tls(provider) if trusted else rendered(Case(provider, tls=True))
    spec = objects.one("BackendTLSPolicy")["spec"]
    authority = (
        {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "sidecar-ca"}]}
        if trusted
        else {"wellKnownCACertificates": "System"}
    )
    assert spec["validation"] == {"hostname": SERVER, **authority}
    target = {"group": "", "kind": "Service", "name": NAME, "sectionName": "grpc-ext-proc"}
    assert spec["targetRefs"] == [target]
    assert rendered(case(provider)).all("BackendTLSPolicy") == ()


def test_the_tls_policy_names_a_port_of_the_service() -> None:
    """Its section is the name of the gRPC port."""
    objects = with_tls("envoy-gateway")
    (target,) = objects.one("BackendTLSPolicy")["spec"]["targetRefs"]
    ports = {port["name"]: port["port"] for port in objects.one("Service", NAME)["spec"]["ports"]}
    assert ports[target["sectionName"]] == 9002


def test_istio_s_tls() -> None:
    """The destination rule verifies CA and name; without TLS it has none."""
    rule = rendered(Case("istio", tls=True)).one("DestinationRule", NAME)["spec"]["trafficPolicy"]
    assert rule["tls"] == {
        "mode": "SIMPLE",
        "credentialName": "ca",
        "sni": SERVER,
        "subjectAltNames": [SERVER],
    }
    plain = rendered(case("istio")).one("DestinationRule", NAME)["spec"]["trafficPolicy"]
    assert "tls" not in plain
    assert plain["connectionPool"]["http"]["http2MaxRequests"] == 100000


def test_agentgateway_s_tls() -> None:
    """A policy on the Service: HTTP/2 over TLS, verified by CA and name."""
    spec = policy(with_tls("agentgateway"), "backend.tls")["spec"]
    assert spec["targetRefs"] == [{"group": "", "kind": "Service", "name": NAME}]
    assert spec["backend"]["http"] == {"version": "HTTP2"}
    assert spec["backend"]["tls"] == {
        "caCertificateRefs": [{"name": "sidecar-ca"}],
        "sni": SERVER,
        "verifySubjectAltNames": [SERVER],
        "alpnProtocols": ["h2"],
    }
    assert [
        item for item in rendered(case("agentgateway")).all("AgentgatewayPolicy") if "backend" in item["spec"]
    ] == []


def test_workers_connections_end_before_the_workers_end_them() -> None:
    """Idle connections close before vLLM ends them after 5 s; a Service named twice gets one policy."""
    shared = {"phases": {"prefill": {"name": "worker"}, "decode": {"name": "worker"}}}
    istio = rendered_with("istio", shared)
    rules = {rule["spec"]["host"]: rule["spec"] for rule in istio.all("DestinationRule")}
    for name, timeout in (("encode", "4s"), ("worker", "4s"), ("inference-internal", "60s")):
        pool = rules[f"{name}.inference.svc.cluster.local"]["trafficPolicy"]["connectionPool"]
        assert pool == {"http": {"idleTimeout": timeout}}
    assert len(istio.all("DestinationRule")) == 4
    idle = {
        item["spec"]["targetRefs"][0]["name"]: item["spec"].get("commonHttpProtocolOptions")
        for item in rendered_with("kgateway", shared).all("BackendConfigPolicy")
    }
    assert idle == {
        NAME: None,
        "encode": {"idleTimeout": "4s"},
        "worker": {"idleTimeout": "4s"},
        "inference-internal": {"idleTimeout": "60s"},
    }
    policies = rendered_with("envoy-gateway", shared)
    assert {
        item["spec"]["targetRefs"][0]["name"]: item["spec"]["timeout"]["http"]["connectionIdleTimeout"]
        for item in policies.all("BackendTrafficPolicy")
    } == {f"{NAME}-phases": "4s", f"{NAME}-clients": "60s"}


COMMANDS = {
    "envoy-gateway": "kubectl get envoyextensionpolicies,clienttrafficpolicies,backendtrafficpolicies -n inf",
    "istio": "istioctl proxy-config listeners -n inference deployment/inference-gateway-istio",
    "kgateway": "kubectl get gatewayextensions,trafficpolicies,listenerpolicies,backendconfigpolicies -n inf",
    "agentgateway": "kubectl get agentgatewaypolicies -n inference",
    "gke": "kubectl get gcproutingextensions,gcpbackendpolicies,healthcheckpolicies -n inference",
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_notes_say_how_to_see_that_it_works(provider: str) -> None:
    """After the installation stand the command that shows acceptance, and where the record is."""
    notes = rendered(case(provider)).notes
    assert COMMANDS[provider] in notes
    assert ("does not\n   reach the log" in notes) == (provider in ("kgateway", "gke"))
    others = [command for name, command in COMMANDS.items() if name != provider]
    assert [command for command in others if command in notes] == []
    assert ("{.type}={.status} {.reason}: {.message}" in notes) == (provider != "istio")
    # kubectl sorts the keys of a condition: what stands around its type is not its status.
    assert "grep -" not in notes


def test_the_notes_say_what_the_access_log_still_needs() -> None:
    """Envoy Gateway prints the record only once the Gateway names the EnvoyProxy."""
    notes = rendered(case("envoy-gateway")).notes
    assert (
        '"parametersRef":{"group":"gateway.envoyproxy.io","kind":"EnvoyProxy","name":"epd-epd-sidecar"}'
        in notes
    )
    off = rendered_with("envoy-gateway", {"attach": {"accessLog": {"enabled": False}}}).notes
    assert "parametersRef" not in off
    assert "shadowMode" in rendered_with("envoy-gateway", PARITY).notes
    assert "shadowMode" not in notes


def test_the_notes_say_what_targeted_routes_need() -> None:
    """Routes of the operator's own have to lead to the internal Gateway's Service."""
    notes = rendered(Case("kgateway", kind="HTTPRoute")).notes
    assert "(inference-internal in inference, port 80)" in notes
