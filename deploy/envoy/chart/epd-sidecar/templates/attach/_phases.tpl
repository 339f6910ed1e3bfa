{{/* Where the phases are, and how clients get there. */}}

{{/* Namespace of the Gateway of the phase routes, and of these. */}}
{{- define "epd-sidecar.phases.namespace" -}}
{{- if include "epd-sidecar.attach.shared" . -}}
{{- include "epd-sidecar.attach.namespace" . -}}
{{- else -}}
{{- default (include "epd-sidecar.attach.namespace" .) .Values.phases.gateway.namespace -}}
{{- end -}}
{{- end -}}

{{/* The Gateways of the phase routes, as policies name them; nothing when there are none. */}}
{{- define "epd-sidecar.phases.gatewayRefs" -}}
{{- if include "epd-sidecar.attach.shared" . -}}
{{- if ne .Values.attach.provider "none" -}}
{{- include "epd-sidecar.attach.gatewayRefs" . -}}
{{- end -}}
{{- else if .Values.phases.gateway.name -}}
{{- include "epd-sidecar.attach.ref" (dict "kind" "Gateway" "of" .Values.phases.gateway) -}}
{{- end -}}
{{- end -}}

{{/*
"true" when the client route is this chart's; "" when the targets are HTTPRoutes, which are it. Never without a filter:
the route leads to the internal Gateway, which believes the phase that a client sends.
*/}}
{{- define "epd-sidecar.phases.hasClientRoute" -}}
{{- $gateways := and (eq (include "epd-sidecar.attach.targetKind" .) "Gateway") (default dict (first .Values.attach.targetRefs)).name -}}
{{- $own := and (ne .Values.attach.provider "none") (not (include "epd-sidecar.attach.shared" .)) -}}
{{- if and .Values.phases.enabled .Values.phases.clientRoute.enabled $gateways $own }}true{{ end -}}
{{- end -}}

{{/*
JSON {name, namespace, port} of the Service of the internal Gateway: what values name, else the one config.gateway.address
leads to; nothing when neither tells. No guess: the sidecar and the client route have to reach the same Gateway.
*/}}
{{- define "epd-sidecar.phases.service" -}}
{{- $namespace := include "epd-sidecar.phases.namespace" . -}}
{{- $given := .Values.phases.service -}}
{{- /* The sidecar reads a URL with a slash at its end like one without. */ -}}
{{- $address := regexReplaceAll "/+$" (trim .Values.config.gateway.address) "" -}}
{{- $label := "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?" -}}
{{- $domain := regexQuoteMeta .Values.attach.istio.clusterDomain -}}
{{- $pattern := printf "^http://([a-z](?:[-a-z0-9]*[a-z0-9])?)(?:\\.(%s))?(?:\\.svc(?:\\.%s)?)?(?::([0-9]+))?$" $label $domain -}}
{{- if $given.name -}}
{{- dict "name" $given.name "namespace" (default $namespace $given.namespace) "port" (int64 $given.port) | toJson -}}
{{- else if and (regexMatch $pattern $address) (ne (include "epd-sidecar.phases.host" .) "localhost") -}}
{{- $port := default "80" (regexReplaceAll $pattern $address "${3}") -}}
{{- dict
  "name" (regexReplaceAll $pattern $address "${1}")
  "namespace" (default .Release.Namespace (regexReplaceAll $pattern $address "${2}"))
  "port" (int64 $port) | toJson -}}
{{- end -}}
{{- end -}}

{{/*
What config.gateway.address looks like with this provider, for messages: the Service that it creates for the Gateway of
the phases.
*/}}
{{- define "epd-sidecar.phases.addressExample" -}}
{{- $provider := .Values.attach.provider -}}
{{- $gateway := default "inference-internal" .Values.phases.gateway.name -}}
{{- if include "epd-sidecar.attach.shared" . }}{{ $gateway = default "inference-gateway" (default dict (first .Values.attach.targetRefs)).name }}{{ end -}}
{{- $namespace := include "epd-sidecar.phases.namespace" . -}}
{{- if eq $provider "istio" -}}
http://{{ $gateway }}-istio.{{ $namespace }}.svc:80
{{- else if eq $provider "envoy-gateway" -}}
http://{{ $gateway }}.envoy-gateway-system.svc:80 (Envoy Gateway puts the Service into its own namespace, under the name that an EnvoyProxy gives it: kubectl get services -A -l gateway.envoyproxy.io/owning-gateway-name={{ $gateway }})
{{- else if eq $provider "gke" -}}
http://10.0.0.5 (kubectl get gateway -n {{ $namespace }} {{ $gateway }} prints its address)
{{- else -}}
http://{{ $gateway }}.{{ $namespace }}.svc:80
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.phases.host" -}}
{{- regexReplaceAll "^https?://([^:/]*).*$" .Values.config.gateway.address "${1}" -}}
{{- end -}}

{{/* Namespace of a phase's backend. Takes a dict: root, backend. */}}
{{- define "epd-sidecar.phases.backendNamespace" -}}
{{- default .root.Release.Namespace .backend.namespace -}}
{{- end -}}

{{/* A phase's backend, as an HTTPRoute of `namespace` names it. Takes a dict: root, backend, namespace. */}}
{{- define "epd-sidecar.phases.backendRef" -}}
{{- $pool := eq .backend.kind "InferencePool" -}}
{{- $namespace := include "epd-sidecar.phases.backendNamespace" . -}}
- group: {{ ternary "inference.networking.k8s.io" "" $pool | quote }}
  kind: {{ .backend.kind }}
  name: {{ .backend.name | quote }}
  {{- if ne $namespace .namespace }}
  namespace: {{ $namespace | quote }}
  {{- end }}
  {{- if not $pool }}
  port: {{ int64 .backend.port }}
  {{- end }}
{{- end -}}

{{/* YAML list {phase, name, namespace} of the distinct Services among the phases' backends. */}}
{{- define "epd-sidecar.phases.services" -}}
{{- $root := . -}}
{{- $seen := list -}}
{{- range $phase := list "encode" "prefill" "decode" -}}
{{- $backend := get $root.Values.phases $phase -}}
{{- $namespace := include "epd-sidecar.phases.backendNamespace" (dict "root" $root "backend" $backend) -}}
{{- $key := printf "%s/%s" $namespace $backend.name -}}
{{- if and (eq $backend.kind "Service") (not (has $key $seen)) -}}
{{- $seen = append $seen $key -}}
- {phase: {{ $phase }}, name: {{ $backend.name | quote }}, namespace: {{ $namespace | quote }}}
{{ end -}}
{{- end -}}
{{- end -}}

{{/* Answers take as long as they take; the sidecar's own step timeouts apply. GKE has no such field, see its policy. */}}
{{- define "epd-sidecar.phases.timeouts" -}}
{{- if ne .Values.attach.provider "gke" -}}
timeouts:
  request: 0s
  backendRequest: 0s
{{- end -}}
{{- end -}}
