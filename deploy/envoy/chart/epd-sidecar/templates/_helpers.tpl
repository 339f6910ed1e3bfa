{{/* Names */}}

{{- define "epd-sidecar.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimAll "-." -}}
{{- end -}}

{{/*
Name of the objects. One of them is a Service, whose name is a DNS label: no dots, which Helm allows in the name of a
release. 50 characters leave room for the suffixes of further objects.
*/}}
{{- define "epd-sidecar.fullname" -}}
{{- $name := include "epd-sidecar.name" . -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if eq .Release.Name $name -}}
{{- $full = $name -}}
{{- end -}}
{{- $full | replace "." "-" | trunc 50 | trimAll "-" -}}
{{- end -}}

{{- define "epd-sidecar.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "epd-sidecar.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.image" -}}
{{- $image := .Values.image -}}
{{- $repository := $image.repository -}}
{{- if $image.registry }}{{ $repository = printf "%s/%s" $image.registry $image.repository }}{{ end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Labels */}}

{{- define "epd-sidecar.labels" -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" (include "epd-sidecar.name" .)
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" (.Chart.AppVersion | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/part-of" "epd-sidecar"
  "app.kubernetes.io/managed-by" .Release.Service -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.commonLabels) $own) -}}
{{- end -}}

{{/* What selects the sidecar's pods, and nothing else of the release (the test pod has another component). */}}
{{- define "epd-sidecar.selectorLabels" -}}
app.kubernetes.io/name: {{ include "epd-sidecar.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: sidecar
{{- end -}}

{{/* Listeners */}}

{{/* "true" when the gRPC listener is a unix socket; "" otherwise. */}}
{{- define "epd-sidecar.listensOnSocket" -}}
{{- if hasPrefix "unix:" (trim .Values.config.ext_proc.listen) }}true{{ end -}}
{{- end -}}

{{/* Directory of the socket, inside the container. */}}
{{- define "epd-sidecar.socketDirectory" -}}
{{- dir (trimPrefix "unix:" (trim .Values.config.ext_proc.listen)) -}}
{{- end -}}

{{/* Port of the gRPC listener; only for TCP. */}}
{{- define "epd-sidecar.extProcPort" -}}
{{- regexFind "(0|[1-9][0-9]*)$" (trim .Values.config.ext_proc.listen) -}}
{{- end -}}

{{/* Port of the admin listener, "" without one. */}}
{{- define "epd-sidecar.adminPort" -}}
{{- regexFind "(0|[1-9][0-9]*)$" (trim .Values.config.admin.listen) -}}
{{- end -}}

{{/* "true" when the gRPC listener serves TLS; "" otherwise. */}}
{{- define "epd-sidecar.tlsEnabled" -}}
{{- if or .Values.tls.existingSecret .Values.config.ext_proc.tls.cert_path }}true{{ end -}}
{{- end -}}

{{/*
"true" when `helm test` can ask the sidecar; "" otherwise: with a certificate that extraVolumes brings the chart does not
know what to trust.
*/}}
{{- define "epd-sidecar.testable" -}}
{{- if and .Values.tests.enabled (or .Values.tls.existingSecret (not .Values.config.ext_proc.tls.cert_path)) }}true{{ end -}}
{{- end -}}

{{- define "epd-sidecar.tlsDirectory" -}}
/etc/epd-sidecar-tls
{{- end -}}

{{/* Name that clients of the gRPC listener find in its certificate. */}}
{{- define "epd-sidecar.tlsServerName" -}}
{{- default (printf "%s.%s.svc" (include "epd-sidecar.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{/* Configuration */}}

{{/* The sidecar's file: config, with what other values decide. */}}
{{- define "epd-sidecar.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $config.ext_proc.tls "cert_path" (include "epd-sidecar.tlsDirectory" .) -}}
{{- end -}}
{{- $steps := list -}}
{{- range $step := $config.pipeline.steps -}}
{{- if and (eq $step.type "render") $.Values.render.address -}}
{{- $step = set $step "params" (merge (dict "address" $.Values.render.address) (default dict $step.params)) -}}
{{- end -}}
{{- $steps = append $steps $step -}}
{{- end -}}
{{- $_ := set $config.pipeline "steps" $steps -}}
{{- toYaml $config -}}
{{- end -}}

{{/* A number as it was written: Helm has floating-point numbers only, and a template prints a million as 1e+06. */}}
{{- define "epd-sidecar.number" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* Type of the last step, which is what answers the client: decode or prefill-decode. */}}
{{- define "epd-sidecar.lastStep" -}}
{{- with last .Values.config.pipeline.steps }}{{ .type }}{{ end -}}
{{- end -}}

{{- define "epd-sidecar.durationPart" -}}
(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:ns|us|µs|ms|s|m|h)
{{- end -}}

{{/*
Whole seconds of a Go-style duration such as 30s, 500ms or 1m30s, rounded up. What is no duration counts as 0: the
validation refuses it, together with everything else. Takes a dict: value.
*/}}
{{- define "epd-sidecar.seconds" -}}
{{- $units := dict "ns" 1e-9 "us" 1e-6 "µs" 1e-6 "ms" 1e-3 "s" 1.0 "m" 60.0 "h" 3600.0 -}}
{{- $seconds := 0.0 -}}
{{- range $item := regexFindAll (include "epd-sidecar.durationPart" .) (toString .value) -1 -}}
{{- $unit := regexFind "[a-zµ]+$" $item -}}
{{- $seconds = addf $seconds (mulf (float64 (trimSuffix $unit $item)) (get $units $unit)) -}}
{{- end -}}
{{- /* A sum of decimal fractions may lie a hair above the whole second it means. */ -}}
{{- ceil (subf $seconds 1e-6) | int64 -}}
{{- end -}}

{{/* Bytes of a Kubernetes quantity such as 3Gi, 2500M or 3221225472; 0 for what is none. Takes a dict: value. */}}
{{- define "epd-sidecar.bytes" -}}
{{- $text := include "epd-sidecar.text" .value -}}
{{- $unit := regexFind "([KMGTPE]i|[kmMGTPE])?$" $text -}}
{{- $units := dict "" 1.0 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0
  "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get $units $unit) | int64 -}}
{{- end -}}

{{/*
Grace period of the pod: the sidecar serves on for 5 s after SIGTERM while health checks notice, gives running requests
drain_timeout, and answers what is left; 5 s more is what it may need to exit. SIGTERM comes after a sleep of preStop.
*/}}
{{- define "epd-sidecar.terminationGracePeriodSeconds" -}}
{{- $drain := dict "value" .Values.config.ext_proc.drain_timeout -}}
{{- $sleep := dig "preStop" "sleep" "seconds" 0 .Values.lifecycle -}}
{{- add 10 (int64 (include "epd-sidecar.seconds" $drain)) (int64 $sleep) -}}
{{- end -}}

{{/* Fewest replicas this installation runs with. */}}
{{- define "epd-sidecar.fewestReplicas" -}}
{{- ternary .Values.autoscaling.minReplicas .Values.replicaCount .Values.autoscaling.enabled | int64 -}}
{{- end -}}
