{{/* Facts that several gateways' templates need. */}}

{{/* Namespace of the targets, and of the policies on them. */}}
{{- define "epd-sidecar.attach.namespace" -}}
{{- default .Release.Namespace .Values.attach.namespace -}}
{{- end -}}

{{/*
Name of an object in a namespace, maybe with a suffix. Outside the release's namespace it ends with that one, or releases
of one name in several namespaces would fight over it. Takes a dict: root, namespace, suffix.
*/}}
{{- define "epd-sidecar.attach.name" -}}
{{- $name := printf "%s%s" (include "epd-sidecar.fullname" .root) (default "" .suffix) -}}
{{- $own := .root.Release.Namespace -}}
{{- /* `helm lint` may have none. */ -}}
{{- if or (not $own) (eq .namespace $own) }}{{ $name }}{{ else }}{{ printf "%s.%s" $name $own }}{{ end -}}
{{- end -}}

{{- define "epd-sidecar.attach.metadata" -}}
name: {{ include "epd-sidecar.attach.name" . | quote }}
namespace: {{ .namespace | quote }}
labels:
  {{- include "epd-sidecar.labels" .root | nindent 2 }}
{{- end -}}

{{/* Kind of the targets: Gateway or HTTPRoute; all of one kind. */}}
{{- define "epd-sidecar.attach.targetKind" -}}
{{- default "Gateway" (default dict (first .Values.attach.targetRefs)).kind -}}
{{- end -}}

{{/* The targets, as policies name them. */}}
{{- define "epd-sidecar.attach.targetRefs" -}}
{{- $kind := include "epd-sidecar.attach.targetKind" . -}}
{{- range .Values.attach.targetRefs -}}
{{- include "epd-sidecar.attach.ref" (dict "kind" $kind "of" .) }}
{{ end -}}
{{- end -}}

{{/* The Gateways whose listeners the clients use, as policies name them; nothing when they are not known. */}}
{{- define "epd-sidecar.attach.gatewayRefs" -}}
{{- $targets := eq (include "epd-sidecar.attach.targetKind" .) "Gateway" -}}
{{- range ternary .Values.attach.targetRefs .Values.attach.gateways $targets -}}
{{- include "epd-sidecar.attach.ref" (dict "kind" "Gateway" "of" .) }}
{{ end -}}
{{- end -}}

{{/* The Gateways among references to them, each once and without its sections. Takes the references as YAML. */}}
{{- define "epd-sidecar.attach.wholeGateways" -}}
{{- $names := list -}}
{{- range . | fromYamlArray }}{{ $names = append $names .name }}{{ end -}}
{{- range uniq $names -}}
{{- include "epd-sidecar.attach.ref" (dict "kind" "Gateway" "of" (dict "name" .)) }}
{{ end -}}
{{- end -}}

{{- define "epd-sidecar.attach.ref" -}}
- group: gateway.networking.k8s.io
  kind: {{ .kind }}
  name: {{ .of.name | quote }}
  {{- with .of.sectionName }}
  sectionName: {{ . | quote }}
  {{- end }}
{{- end -}}

{{/* The sidecar's Service, as backendRefs of another namespace or of the same one name it. */}}
{{- define "epd-sidecar.attach.backendRef" -}}
group: ""
kind: Service
name: {{ include "epd-sidecar.fullname" . | quote }}
{{- if ne (include "epd-sidecar.attach.namespace" .) .Release.Namespace }}
namespace: {{ .Release.Namespace | quote }}
{{- end }}
port: {{ include "epd-sidecar.extProcPort" . }}
{{- end -}}

{{/* Application protocol of the gRPC port: what makes the gateway speak HTTP/2 to it. */}}
{{- define "epd-sidecar.attach.appProtocol" -}}
{{- if eq .Values.attach.provider "gke" -}}
HTTP2
{{- else if not (include "epd-sidecar.tlsEnabled" .) -}}
kubernetes.io/h2c
{{- else if eq .Values.attach.provider "kgateway" -}}
grpc
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.deadlineSeconds" -}}
{{- include "epd-sidecar.seconds" (dict "value" .Values.config.ext_proc.request_deadline) -}}
{{- end -}}

{{/*
Timeout of one message. Envoy does not apply it in full duplex, where the sidecar keeps the deadline itself; in the
buffered mode the default of 200 ms ends every request that has media. Envoy refuses a listener whose filter says more
than an hour, and a running proxy then keeps the one it has, without the filter.
*/}}
{{- define "epd-sidecar.attach.messageTimeout" -}}
{{- min 3600 (add 10 (include "epd-sidecar.attach.deadlineSeconds" . | int64)) -}}s
{{- end -}}

{{/* Runs while the sidecar works and while decode generates in silence. In seconds, the unit of Envoy's own files. */}}
{{- define "epd-sidecar.attach.streamIdleTimeout" -}}
{{- max 900 (add 10 (include "epd-sidecar.attach.deadlineSeconds" . | int64)) -}}s
{{- end -}}

{{/* The same as a duration of the Gateway API, where a number has five digits at most. */}}
{{- define "epd-sidecar.attach.streamIdleDuration" -}}
{{- $timeout := include "epd-sidecar.attach.streamIdleTimeout" . -}}
{{- $seconds := trimSuffix "s" $timeout | int64 -}}
{{- if le $seconds 99999 -}}
{{- $timeout -}}
{{- else -}}
{{- div $seconds 3600 }}h{{ div (mod $seconds 3600) 60 }}m{{ mod $seconds 60 }}s
{{- end -}}
{{- end -}}

{{/*
Bytes of the listener's buffer: the size of chunks in full duplex, the limit of a body in the buffered mode. A buffered
body that the sidecar has rewritten has to fit in, too: it brings the KV and embedding parameters, less than 1 MiB.
*/}}
{{- define "epd-sidecar.attach.bufferBytes" -}}
{{- if eq .Values.attach.bodyMode "Buffered" -}}
{{- add 1048576 (ceil (mulf (float64 .Values.config.ext_proc.max_request_body_size) 1048576.0) | int64) -}}
{{- else -}}
1048576
{{- end -}}
{{- end -}}

{{/* "true" when the sidecar has to see the headers of decode's answer; "" otherwise. */}}
{{- define "epd-sidecar.attach.seesResponse" -}}
{{- if eq (include "epd-sidecar.lastStep" .) "prefill-decode" }}true{{ end -}}
{{- end -}}

{{/* "true" when a second, observing filter reads the prompt tokens that decode reports; "" otherwise. */}}
{{- define "epd-sidecar.attach.observes" -}}
{{- if eq (toString .Values.config.observability.prompt_token_parity) "warn" }}true{{ end -}}
{{- end -}}

{{/* "true" with one Gateway for clients and sub-requests; "" otherwise. */}}
{{- define "epd-sidecar.attach.shared" -}}
{{- if eq .Values.attach.topology "shared-listener" }}true{{ end -}}
{{- end -}}

{{/*
Headers that no client may send, removed before a route is chosen. Not on a shared listener: it would remove them from
the sidecar's own sub-requests. Never the hop guard x-epd-hop, which turns a gateway.address that points back into 508.
*/}}
{{- define "epd-sidecar.attach.strippedHeaders" -}}
{{- if not (include "epd-sidecar.attach.shared" .) -}}
- epp-profile
- x-epd-phase-token
{{- end -}}
{{- end -}}

{{/* Keys of the sidecar's record, in its order. */}}
{{- define "epd-sidecar.attach.recordKeys" -}}
[request_id, api, model, stream, outcome, stage, error, media, prompt_tokens, placeholder_tokens, mm_payload,
render_form, encode_form, encode_requests, prefill_form, fallback_reason, media_ms, render_ms, encode_ms, prefill_ms,
total_ms, overhead_ms, request_bytes, render_bytes]
{{- end -}}

{{/*
Fields of one access-log line, with Envoy's command operators. Takes a dict: root; filter, the name of the filter ("" if
unknown); record, whether the sidecar's record reaches the log.
*/}}
{{- define "epd-sidecar.attach.logFormat" -}}
start_time: "%START_TIME%"
method: "%REQ(:METHOD)%"
# Without the query string, which may hold secrets.
path: "%PATH(NQ)%"
code: "%RESPONSE_CODE%"
# epd_... when the sidecar answered with an error.
details: "%RESPONSE_CODE_DETAILS%"
flags: "%RESPONSE_FLAGS%"
duration_ms: "%DURATION%"
route: "%ROUTE_NAME%"
upstream_cluster: "%UPSTREAM_CLUSTER%"
upstream_host: "%UPSTREAM_HOST%"
{{- with .filter }}
ext_proc: "%FILTER_STATE({{ . }}:PLAIN)%"
{{- end }}
{{- if .record }}
# The sidecar's record. Null in all of them: the sidecar never answered this request.
{{- $namespace := .root.Values.config.observability.metadata_namespace }}
{{- range include "epd-sidecar.attach.recordKeys" .root | fromYamlArray }}
{{ . }}: "%DYNAMIC_METADATA({{ $namespace }}:{{ . }})%"
{{- end }}
{{- else }}
request_id: "%REQ(X-REQUEST-ID)%"
{{- end }}
{{- end -}}
