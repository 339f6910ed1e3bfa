{{/*
What a configuration of several keys amounts to: the sidecar ends at its start, and every pod with it, where one of these
rules is broken. First those of sidecar.config.sequence, in its words: which steps may stand together, in which order,
and with which KV connector. A line per finding.
*/}}
{{- define "epd-sidecar.problem.steps" -}}
{{- include "epd-sidecar.steps.order" . }}
{{- include "epd-sidecar.steps.last" . }}
{{- include "epd-sidecar.steps.connectors" . }}
{{- include "epd-sidecar.steps.format" . }}
{{- end -}}

{{- define "epd-sidecar.steps.order" -}}
{{- $order := include "epd-sidecar.config.order" . | fromYamlArray -}}
{{- $position := dict -}}
{{- range $index, $kind := $order }}{{ $_ := set $position $kind $index }}{{ end -}}
{{- $latest := first $order -}}
{{- $seen := list -}}
{{- range $index, $step := .Values.config.pipeline.steps -}}
{{- if has $step.type $seen }}
config.pipeline.steps[{{ $index }}]: {{ $step.type | quote }} is listed twice; remove one of them
{{- else if lt (get $position $step.type | int) (get $position $latest | int) }}
config.pipeline.steps[{{ $index }}]: {{ $step.type | quote }} must come before {{ $latest | quote }}; the order is {{ without $order "prefill-decode" | join ", " }}
{{- else -}}
{{- $latest = $step.type -}}
{{- end -}}
{{- $seen = append $seen $step.type -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.steps.last" -}}
{{- $places := dict -}}
{{- range $index, $step := .Values.config.pipeline.steps }}{{ $_ := set $places $step.type $index }}{{ end -}}
{{- if hasKey $places "prefill-decode" -}}
{{- range $kind := list "prefill" "decode" -}}
{{- if hasKey $places $kind }}
config.pipeline.steps[{{ get $places $kind }}]: {{ $kind | quote }} is part of "prefill-decode"; remove one of them
{{- end -}}
{{- end -}}
{{- else if not (hasKey $places "decode") }}
config.pipeline.steps: the last step is missing; add {type: decode} at the end
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.steps.connectors" -}}
{{- $shared := .Values.config.pipeline.kv_connector -}}
{{- range $index, $step := .Values.config.pipeline.steps -}}
{{- $connector := default $shared (default dict $step.params).kv_connector -}}
{{- if and (eq $step.type "prefill-decode") (ne $connector "kv-sglang") }}
config.pipeline.steps[{{ $index }}]: "prefill-decode" works with kv_connector kv-sglang only; set it, or use the steps prefill and decode
{{- else if and (has $step.type (list "prefill" "decode")) (eq $connector "kv-sglang") }}
config.pipeline.steps[{{ $index }}]: with kv-sglang prefill answers only while decode runs; list the steps, with {type: prefill-decode} in place of prefill and decode
{{- /* One mistake, however many steps it shows in. */ -}}
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.steps.format" -}}
{{- $text := "false needs the token ids of a render step; add one to pipeline.steps, or set it to true" -}}
{{- $types := list -}}
{{- range .Values.config.pipeline.steps }}{{ $types = append $types .type }}{{ end -}}
{{- if not (has "render" $types) -}}
{{- if not .Values.config.pipeline.use_openai_format }}
config.pipeline.use_openai_format: {{ $text }}
{{- end -}}
{{- range $index, $step := .Values.config.pipeline.steps -}}
{{- $params := default dict $step.params -}}
{{- if and (hasKey $params "use_openai_format") (not (kindIs "invalid" $params.use_openai_format)) (not $params.use_openai_format) }}
config.pipeline.steps[{{ $index }}].params.use_openai_format: {{ $text }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What else one key alone cannot show, with the words of sidecar.config.load. A line per finding. */}}
{{- define "epd-sidecar.problem.crossChecks" -}}
{{- $config := .Values.config -}}
{{- $body := include "epd-sidecar.text" $config.ext_proc.max_request_body_size -}}
{{- $total := include "epd-sidecar.text" $config.limits.max_in_flight_bytes -}}
{{- $unreadable := print (include "epd-sidecar.form.megabytes" $body) (include "epd-sidecar.form.megabytes" $total) -}}
{{- if and (not $unreadable) (lt (float64 $total) (float64 $body)) }}
config.limits.max_in_flight_bytes: {{ $total }} MB is less than ext_proc.max_request_body_size ({{ $body }} MB); raise it, or lower the other
{{- end -}}
{{- if and (or .Values.phaseToken.existingSecret $config.gateway.phase_token) (not $config.ext_proc.clear_route_cache) }}
config.ext_proc.clear_route_cache: false lets a client choose its route by EPP-Profile where gateway.phase_token is used; set true
{{- end -}}
{{- if $config.observability.tracing }}
config.observability.tracing: this version exports no spans of its own; set it to false (trace context is always passed on)
{{- end -}}
{{- end -}}
