{{/*
Combinations that no gateway of this provider can serve. Each problem is a template that prints what is wrong and what to
do, or nothing; the chart's validation collects them.
*/}}
{{- define "epd-sidecar.attach.problems" -}}
{{- if ne .Values.attach.provider "none" -}}
{{- range $name := list
  "targetName" "targetKinds" "targetNotGateway" "targetSection" "targetListeners" "targetShared"
  "phasesGateway" "phasesGatewayExposed" "phasesGatewayShared" "phasesService" "addressLeadsBack" "clientPaths"
  "buffered" "deadline" "tlsRequired" "tlsTrust" "namespace" "responseHeaders" "parity" "servedStream" "mergeType" -}}
{{- include (printf "epd-sidecar.attach.problem.%s" $name) $ | trim }}
{{ end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.targetName" -}}
{{- if not .Values.attach.targetRefs -}}
attach.targetRefs is empty: name the Gateway that attach.provider {{ .Values.attach.provider }} attaches the filter to, as `- name: inference-gateway`
{{- end -}}
{{- range $index, $target := .Values.attach.targetRefs -}}
{{- if not $target.name -}}
attach.targetRefs[{{ $index }}].name is missing: name the {{ default "Gateway" $target.kind }} that attach.provider {{ $.Values.attach.provider }} attaches the filter to
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.targetKinds" -}}
{{- $kind := include "epd-sidecar.attach.targetKind" . -}}
{{- range .Values.attach.targetRefs -}}
{{- if ne (default "Gateway" .kind) $kind -}}
attach.targetRefs mixes Gateways and HTTPRoutes: name either the Gateway or its routes, or install the chart twice
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.targetNotGateway" -}}
{{- if and (has .Values.attach.provider (list "istio" "gke")) (eq (include "epd-sidecar.attach.targetKind" .) "HTTPRoute") -}}
attach.provider {{ .Values.attach.provider }} attaches to whole Gateways only: name the Gateway in attach.targetRefs, not an HTTPRoute
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.targetSection" -}}
{{- if has .Values.attach.provider (list "istio" "gke") -}}
{{- range .Values.attach.targetRefs -}}
{{- if .sectionName -}}
attach.targetRefs[].sectionName {{ .sectionName }}: attach.provider {{ $.Values.attach.provider }} attaches to whole Gateways only; leave it out, and give other listeners a Gateway of their own
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.targetListeners" -}}
{{- $listeners := or .Values.attach.listenerPolicy.enabled .Values.attach.accessLog.enabled -}}
{{- $capable := has .Values.attach.provider (list "envoy-gateway" "kgateway" "agentgateway") -}}
{{- if and $capable $listeners (not (include "epd-sidecar.attach.gatewayRefs" .)) -}}
attach.gateways is empty: header removal and access log are settings of a Gateway's listeners; name the Gateway of the targeted HTTPRoutes, or set attach.listenerPolicy.enabled and attach.accessLog.enabled to false and write those settings yourself
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.targetShared" -}}
{{- if and (include "epd-sidecar.attach.shared" .) (eq (include "epd-sidecar.attach.targetKind" .) "HTTPRoute") -}}
attach.topology shared-listener needs the filter on every route, or a client that sends EPP-Profile itself would walk past it: name the Gateway in attach.targetRefs, not an HTTPRoute
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.phasesGateway" -}}
{{- if and .Values.phases.enabled (not (include "epd-sidecar.attach.shared" .)) (not .Values.phases.gateway.name) -}}
phases.gateway.name is missing: name the internal Gateway, on which encode, prefill and decode get their routes, or set phases.enabled to false and write them yourself
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.phasesGatewayExposed" -}}
{{- if and .Values.phases.gateway.name (not (include "epd-sidecar.attach.shared" .)) -}}
{{- range include "epd-sidecar.attach.gatewayRefs" . | fromYamlArray -}}
{{- if and (eq .name $.Values.phases.gateway.name) (eq (include "epd-sidecar.phases.namespace" $) (include "epd-sidecar.attach.namespace" $)) -}}
phases.gateway.name {{ .name }} is the Gateway that clients reach: they would choose phases at will, and the sidecar's requests would come back to it; use another Gateway with a ClusterIP, or attach.topology shared-listener
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.phasesGatewayShared" -}}
{{- if and (include "epd-sidecar.attach.shared" .) .Values.phases.gateway.name -}}
phases.gateway.name {{ .Values.phases.gateway.name }}: with attach.topology shared-listener the phases are on the attached Gateway; leave it empty
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.phasesService" -}}
{{- $reenters := and (include "epd-sidecar.phases.hasClientRoute" .) (ne .Values.attach.provider "gke") -}}
{{- if and $reenters .Values.config.gateway.address (not (include "epd-sidecar.phases.service" .)) -}}
{{- if hasPrefix "https://" (lower .Values.config.gateway.address) -}}
config.gateway.address {{ .Values.config.gateway.address }} is https, and the client route calls the internal Gateway's Service in plaintext: use its http listener, for example {{ include "epd-sidecar.phases.addressExample" . }}, or name the Service and a port without TLS in phases.service
{{- else -}}
phases.service.name is missing: config.gateway.address {{ .Values.config.gateway.address }} is not an http Service of the cluster, such as http://name.namespace.svc:80; name the internal Gateway's Service, which clients are sent on to
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Names of the Services that the providers create for a Gateway; Envoy Gateway's ends with a hash. */ -}}
{{- define "epd-sidecar.attach.problem.addressLeadsBack" -}}
{{- $service := include "epd-sidecar.phases.service" . | default "{}" | fromJson -}}
{{- $names := dict "istio" "%s-istio" "kgateway" "%s" "agentgateway" "%s" "envoy-gateway" "%s" -}}
{{- $namespace := include "epd-sidecar.attach.namespace" . -}}
{{- if and $service (hasKey $names .Values.attach.provider) (not (include "epd-sidecar.attach.shared" .)) -}}
{{- range include "epd-sidecar.attach.gatewayRefs" . | fromYamlArray -}}
{{- $own := and (eq $service.name (printf (get $names $.Values.attach.provider) .name)) (eq $service.namespace $namespace) -}}
{{- $hashed := regexMatch (printf "^envoy-%s-[0-9a-f]{8}$" (printf "%s-%s" $namespace .name | trunc 48 | trimSuffix "-")) $service.name -}}
{{- if or $own (and $hashed (eq $.Values.attach.provider "envoy-gateway")) -}}
{{ ternary "phases.service.name" "config.gateway.address" (ne $.Values.phases.service.name "") }} {{ default $.Values.config.gateway.address $.Values.phases.service.name }} is the Service of the Gateway {{ .name }}, which has the filter: the sidecar's requests would come back to it (508); name the internal Gateway's Service, for example {{ include "epd-sidecar.phases.addressExample" $ }}
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.clientPaths" -}}
{{- if and .Values.phases.enabled (not .Values.phases.clientRoute.paths) (or (include "epd-sidecar.phases.hasClientRoute" .) (include "epd-sidecar.attach.shared" .)) -}}
phases.clientRoute.paths is empty: list the paths that clients reach, as {type: Exact, value: /v1/chat/completions}, or set phases.clientRoute.enabled to false and write the route yourself
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.buffered" -}}
{{- if eq .Values.attach.bodyMode "Buffered" -}}
{{- if eq .Values.attach.provider "agentgateway" -}}
attach.bodyMode Buffered: agentgateway buffers 8 KB and refuses what is longer; use FullDuplexStreamed
{{- else if eq .Values.attach.provider "gke" -}}
attach.bodyMode Buffered: GKE's extensions have no such mode; use FullDuplexStreamed
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.deadline" -}}
{{- if and (eq .Values.attach.provider "gke") (gt (include "epd-sidecar.attach.deadlineSeconds" . | int64) 10) -}}
config.ext_proc.request_deadline {{ .Values.config.ext_proc.request_deadline }} is longer than the 10s that GKE gives an extension: set 10s or less, so that the sidecar answers before the load balancer gives up
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.tlsRequired" -}}
{{- if and (eq .Values.attach.provider "gke") (not (include "epd-sidecar.tlsEnabled" .)) -}}
attach.provider gke calls extensions over TLS: create a Secret with a certificate (self-signed will do) and name it in tls.existingSecret
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.tlsTrust" -}}
{{- if and (eq .Values.attach.provider "istio") (include "epd-sidecar.tlsEnabled" .) (not .Values.attach.tls.caSecret) -}}
attach.tls.caSecret is missing: without the CA of the sidecar's certificate (key ca.crt, in the Gateway's namespace) Istio would not verify it
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.namespace" -}}
{{- if and (eq .Values.attach.provider "gke") (ne (include "epd-sidecar.attach.namespace" .) .Release.Namespace) -}}
attach.namespace {{ .Values.attach.namespace }}: a GKE extension calls Services of its Gateway's namespace only; install the release there
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.responseHeaders" -}}
{{- if and (eq .Values.attach.provider "gke") (include "epd-sidecar.attach.seesResponse" .) -}}
the prefill-decode step has to see decode's response headers, which a GCPRoutingExtension does not send: use prefill and decode
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.parity" -}}
{{- if and (include "epd-sidecar.attach.observes" .) (has .Values.attach.provider (list "kgateway" "agentgateway" "gke")) -}}
config.observability.prompt_token_parity warn needs a filter that observes answers together with the sidecar's record, which attach.provider {{ .Values.attach.provider }} cannot express: set it to off
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.servedStream" -}}
{{- if eq .Values.attach.provider "agentgateway" -}}
{{- range .Values.config.pipeline.steps -}}
{{- if eq .type "conditional-decode" -}}
the conditional-decode step streams a worker's answer through the filter, which agentgateway does not know: take it out of config.pipeline.steps
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.problem.mergeType" -}}
{{- if and (eq .Values.attach.provider "envoy-gateway") .Values.attach.envoyGateway.mergeType (eq (include "epd-sidecar.attach.targetKind" .) "Gateway") -}}
attach.envoyGateway.mergeType merges the policy of an HTTPRoute into that of its Gateway: leave it empty where the target is a Gateway
{{- end -}}
{{- end -}}
