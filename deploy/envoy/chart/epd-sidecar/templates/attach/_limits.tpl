{{/*
Sizes, times and names that a gateway of this provider does not take. Each problem is a template that prints what is wrong
and what to do, or nothing; the chart's validation collects them.
*/}}
{{- define "epd-sidecar.attach.limits" -}}
{{- if ne .Values.attach.provider "none" -}}
{{- range $name := list "bufferedBody" "bufferedDeadline" "sharedPicker" "targetCount" "metadataNamespace" "healthPath" -}}
{{- include (printf "epd-sidecar.attach.limit.%s" $name) $ | trim }}
{{ end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.limit.bufferedBody" -}}
{{- /* MB of the largest body that, with the room of a rewritten one, fits the field: uint32 in Envoy, int32 in kgateway. */ -}}
{{- $largest := get (dict "envoy-gateway" 4094 "istio" 4094 "kgateway" 2046) .Values.attach.provider -}}
{{- $size := .Values.config.ext_proc.max_request_body_size -}}
{{- if and (eq .Values.attach.bodyMode "Buffered") $largest (gt (float64 $size) (float64 $largest)) -}}
config.ext_proc.max_request_body_size {{ include "epd-sidecar.number" $size }} is more MB than {{ .Values.attach.provider }} buffers: with attach.bodyMode Buffered use {{ $largest }} or less
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.limit.bufferedDeadline" -}}
{{- $envoy := has .Values.attach.provider (list "envoy-gateway" "istio" "kgateway") -}}
{{- if and $envoy (eq .Values.attach.bodyMode "Buffered") (gt (include "epd-sidecar.attach.deadlineSeconds" . | int64) 3590) -}}
config.ext_proc.request_deadline {{ .Values.config.ext_proc.request_deadline }} is longer than Envoy waits for a message, which is an hour: with attach.bodyMode Buffered use 59m50s or less
{{- end -}}
{{- end -}}

{{- /*
Envoy takes the filters that are off by default and on per route from the route a request came by, and decode's is another
one. Requests of encode and prefill come by their own.
*/ -}}
{{- define "epd-sidecar.attach.limit.sharedPicker" -}}
{{- $perRoute := has .Values.attach.provider (list "envoy-gateway" "istio" "kgateway") -}}
{{- $pool := eq .Values.phases.decode.kind "InferencePool" -}}
{{- if and $perRoute $pool .Values.phases.enabled (include "epd-sidecar.attach.shared" .) -}}
phases.decode.kind InferencePool: {{ .Values.attach.provider }} switches endpoint pickers on per route, and one may be skipped where the sidecar has chosen another route, as it does on attach.topology shared-listener; use internal-listener, or a Service
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.limit.targetCount" -}}
{{- if and (eq .Values.attach.provider "gke") (gt (len .Values.attach.targetRefs) 10) -}}
attach.targetRefs names {{ len .Values.attach.targetRefs }} Gateways, and a GCPRoutingExtension takes 10: install the chart once more for the others
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.limit.metadataNamespace" -}}
{{- $namespace := .Values.config.observability.metadata_namespace -}}
{{- if and (eq .Values.attach.provider "envoy-gateway") (hasPrefix "envoy.filters.http" $namespace) -}}
config.observability.metadata_namespace {{ $namespace }}: Envoy Gateway keeps names that begin with envoy.filters.http to itself; use another, such as epd.sidecar
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.attach.limit.healthPath" -}}
{{- if and (eq .Values.attach.provider "gke") .Values.phases.enabled .Values.phases.backendPolicy.enabled -}}
{{- $root := . -}}
{{- $paths := dict -}}
{{- range $phase := list "encode" "prefill" "decode" -}}
{{- $backend := get $root.Values.phases $phase -}}
{{- $key := printf "%s/%s" (include "epd-sidecar.phases.backendNamespace" (dict "root" $root "backend" $backend)) $backend.name -}}
{{- if and (eq $backend.kind "Service") (ne $backend.healthPath (default $backend.healthPath (get $paths $key))) -}}
phases.{{ $phase }}.healthPath {{ $backend.healthPath }}: the Service {{ $backend.name }} is that of another phase, too, and has one health check; write the same path for both
{{- break -}}
{{- end -}}
{{- $_ := set $paths $key $backend.healthPath -}}
{{- end -}}
{{- end -}}
{{- end -}}
