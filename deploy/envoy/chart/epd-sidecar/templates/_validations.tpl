{{/*
Combinations that cannot work, all of them in one message. Each problem is a template that prints what is wrong and what
to do, or nothing; what a single key may hold is in _forms.tpl, and its kind in values.schema.json.
*/}}
{{- define "epd-sidecar.validate" -}}
{{- $problems := list -}}
{{- range $name := list
  "imageRepository" "gatewayAddress" "renderAddress" "renderStep" "renderAddressTwice" "pinnedPrefill"
  "forms" "steps" "crossChecks"
  "phaseTokenLiteral" "phaseTokenTwice" "phaseTokenMissing"
  "socketWithoutUds" "udsWithoutSocket" "udsWithProvider" "udsWithAutoscaling"
  "listenAddress" "adminAddress" "samePort" "adminForProbes" "adminForMetrics" "certificateTwice"
  "autoscalingRange" "disruptionBudgetChoice" "disruptionBudgetBlocks" "memory"
  "networkPolicyGateway" "networkPolicyEgress" -}}
{{- range splitList "\n" (include (printf "epd-sidecar.problem.%s" $name) $) -}}
{{- with trim . }}{{ $problems = append $problems . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $part := list "epd-sidecar.pod.problems" "epd-sidecar.attach.problems" "epd-sidecar.attach.limits" -}}
{{- range splitList "\n" (include $part $) -}}
{{- with trim . }}{{ $problems = append $problems . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n- %s" (join "\n- " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.imageRepository" -}}
{{- if not .Values.image.repository -}}
image.repository is missing: no image is published; build the repository's Dockerfile, push it, and name it, for example registry.example/epd-sidecar
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.gatewayAddress" -}}
{{- if not .Values.config.gateway.address -}}
config.gateway.address is missing: set the base URL of the {{ ternary "attached" "internal" (ne (include "epd-sidecar.attach.shared" .) "") }} Gateway's Service, for example {{ include "epd-sidecar.phases.addressExample" . }}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.renderAddress" -}}
{{- range .Values.config.pipeline.steps -}}
{{- if and (eq .type "render") (not $.Values.render.address) (not (default dict .params).address) -}}
render.address is missing: set the base URL of the render service, for example http://render.{{ $.Release.Namespace }}.svc:8000, or take the render step out of config.pipeline.steps
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.renderStep" -}}
{{- $types := list -}}
{{- range .Values.config.pipeline.steps }}{{ $types = append $types .type }}{{ end -}}
{{- if and .Values.render.address (not (has "render" $types)) -}}
render.address is set, but config.pipeline.steps has no render step: add one, or leave the address out
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.renderAddressTwice" -}}
{{- range .Values.config.pipeline.steps -}}
{{- if and (eq .type "render") $.Values.render.address (default dict .params).address -}}
the address of the render step is set in render.address and in config.pipeline.steps: remove one of them
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.pinnedPrefill" -}}
{{- $routes := and .Values.phases.enabled (include "epd-sidecar.phases.gatewayRefs" .) -}}
{{- if and $routes (eq (include "epd-sidecar.lastStep" .) "prefill-decode") (ne .Values.phases.prefill.kind "InferencePool") -}}
phases.prefill.kind {{ .Values.phases.prefill.kind }}: the prefill-decode step reserves a prefill worker and pins its call to it (x-prefill-pin), which takes an endpoint picker; name an InferencePool, or set phases.enabled to false and write routes to one yourself
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.phaseTokenLiteral" -}}
{{- with .Values.config.gateway.phase_token -}}
{{- if not (hasPrefix "file:/" .) -}}
config.gateway.phase_token would be readable in the ConfigMap: put it into a Secret and name that in phaseToken.existingSecret, or write file: and the absolute path of a mounted one
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.phaseTokenTwice" -}}
{{- if and .Values.phaseToken.existingSecret (hasPrefix "file:" .Values.config.gateway.phase_token) -}}
the phase token is set in phaseToken.existingSecret and in config.gateway.phase_token: remove one of them
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.phaseTokenMissing" -}}
{{- if and (ne .Values.attach.provider "none") (eq .Values.attach.topology "shared-listener") -}}
{{- if not (or .Values.phaseToken.existingSecret .Values.config.gateway.phase_token) -}}
attach.topology shared-listener needs a phase token, or sub-requests would be taken for a loop (508): create a Secret with 16 characters or more and name it in phaseToken.existingSecret
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.socketWithoutUds" -}}
{{- if and (include "epd-sidecar.listensOnSocket" .) (not .Values.uds.enabled) -}}
config.ext_proc.listen is a unix socket, which no Service reaches: set uds.enabled for an Envoy on the same node, or use 0.0.0.0:9002
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.udsWithoutSocket" -}}
{{- if and .Values.uds.enabled (not (include "epd-sidecar.listensOnSocket" .)) -}}
uds.enabled needs a socket in config.ext_proc.listen, for example unix:/run/epd-sidecar/ext_proc.sock
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.udsWithProvider" -}}
{{- if and .Values.uds.enabled (ne .Values.attach.provider "none") -}}
attach.provider {{ .Values.attach.provider }} reaches the sidecar through its Service, which uds.enabled leaves out: set attach.provider none and attach the node's Envoy yourself, or switch uds off
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.udsWithAutoscaling" -}}
{{- if and .Values.uds.enabled .Values.autoscaling.enabled -}}
autoscaling.enabled has nothing to scale: uds.enabled runs one pod per node; switch one of them off
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.listenAddress" -}}
{{- if not (include "epd-sidecar.listensOnSocket" .) -}}
{{- include "epd-sidecar.notReachable" (dict "listen" .Values.config.ext_proc.listen "key" "config.ext_proc.listen" "use" "0.0.0.0:9002") -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.adminAddress" -}}
{{- with trim .Values.config.admin.listen -}}
{{- include "epd-sidecar.notReachable" (dict "listen" . "key" "config.admin.listen" "use" "0.0.0.0:9090") -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.notReachable" -}}
{{- $listen := trim .listen -}}
{{- if regexMatch "^(127\\.|localhost:|\\[(0*:)+0*1\\]:)" (lower $listen) -}}
{{ .key }} {{ $listen }} is reachable inside the pod only: use {{ .use }}
{{- else if regexMatch ":0+$" $listen -}}
{{ .key }} {{ $listen }} takes any free port, which nobody could find: use {{ .use }}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.samePort" -}}
{{- if and (not (include "epd-sidecar.listensOnSocket" .)) (eq (include "epd-sidecar.extProcPort" .) (include "epd-sidecar.adminPort" .)) -}}
config.admin.listen and config.ext_proc.listen share port {{ include "epd-sidecar.adminPort" . }}: a pod has it once; use 9090 and 9002
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.adminForProbes" -}}
{{- if and (not (include "epd-sidecar.adminPort" .)) (or .Values.uds.enabled (include "epd-sidecar.tlsEnabled" .)) -}}
config.admin.listen must not be empty with TLS or uds: the kubelet's gRPC probes reach neither, and ask /healthz and /readyz instead
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.adminForMetrics" -}}
{{- if and (not (include "epd-sidecar.adminPort" .)) (or .Values.serviceMonitor.enabled .Values.prometheusRule.enabled) -}}
serviceMonitor and prometheusRule need /metrics: set config.admin.listen, or switch both off
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.certificateTwice" -}}
{{- if and .Values.tls.existingSecret .Values.config.ext_proc.tls.cert_path -}}
the certificate is set in tls.existingSecret and in config.ext_proc.tls.cert_path: remove one of them
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.autoscalingRange" -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (int64 .minReplicas) (int64 .maxReplicas)) -}}
autoscaling.minReplicas {{ .minReplicas }} is more than autoscaling.maxReplicas {{ .maxReplicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.disruptionBudgetChoice" -}}
{{- with .Values.podDisruptionBudget -}}
{{- $minimum := ne (toString .minAvailable) "" -}}
{{- $maximum := ne (toString .maxUnavailable) "" -}}
{{- if and .enabled (eq $minimum $maximum) -}}
podDisruptionBudget takes one of minAvailable and maxUnavailable: set the other to ""
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.disruptionBudgetBlocks" -}}
{{- if and .Values.podDisruptionBudget.enabled (not .Values.uds.enabled) -}}
{{- $replicas := include "epd-sidecar.fewestReplicas" . | int64 -}}
{{- $minimum := toString .Values.podDisruptionBudget.minAvailable -}}
{{- $maximum := toString .Values.podDisruptionBudget.maxUnavailable -}}
{{- $kept := -1 -}}
{{- if hasSuffix "%" $minimum -}}
{{- /* Kubernetes rounds up. */ -}}
{{- $kept = ceil (divf (mulf (float64 (trimSuffix "%" $minimum)) (float64 $replicas)) 100.0) | int64 -}}
{{- else if $minimum -}}
{{- $kept = int64 $minimum -}}
{{- end -}}
{{- if ge (int64 $kept) $replicas -}}
podDisruptionBudget.minAvailable {{ $minimum }} of {{ $replicas }} replicas would never let a node drain: run more replicas, or lower it
{{- else if or (eq $maximum "0") (eq $maximum "0%") -}}
podDisruptionBudget.maxUnavailable {{ $maximum }} would never let a node drain: use 1
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.memory" -}}
{{- with (default dict .Values.resources.limits).memory -}}
{{- $memory := include "epd-sidecar.bytes" (dict "value" .) | int64 -}}
{{- $held := mulf (float64 $.Values.config.limits.max_in_flight_bytes) 1048576.0 -}}
{{- if and $memory (lt (float64 $memory) (mulf $held 1.5)) -}}
resources.limits.memory {{ . }} is less than one and a half times config.limits.max_in_flight_bytes ({{ $.Values.config.limits.max_in_flight_bytes }} MB), which ends in an OOM kill: raise it, or lower the limit
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.networkPolicyGateway" -}}
{{- if and .Values.networkPolicy.enabled (not .Values.uds.enabled) (not .Values.networkPolicy.gateway) -}}
networkPolicy.gateway is empty, which would let nobody in: select the pods of the gateway's Envoy
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.problem.networkPolicyEgress" -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled .egress.enabled (not .egress.rules) -}}
networkPolicy.egress.rules is empty, which would cut the sidecar off: allow the internal gateway and the render service
{{- end -}}
{{- end -}}
{{- end -}}
