{{/* Prints every condition of the objects that kubectl has found, with its reason and its message. */}}
{{- define "epd-sidecar.attach.conditions" -}}
-o jsonpath='{range .items[*]}{.kind}/{.metadata.name}{"\n"}{range .status..conditions[*]}  {.type}={.status} {.reason}: {.message}{"\n"}{end}{end}'
{{- end -}}

{{/* What to do and to look at after an installation, per gateway. */}}
{{- define "epd-sidecar.attach.notes" -}}
{{- $provider := .Values.attach.provider -}}
{{- $namespace := include "epd-sidecar.attach.namespace" . -}}
{{- $gateway := default "GATEWAY" (get (default dict (first (include "epd-sidecar.attach.gatewayRefs" . | fromYamlArray))) "name") -}}
{{- $ours := printf "-n %s -l app.kubernetes.io/instance=%s" $namespace .Release.Name -}}
2. Check that the gateway has accepted the filter:
{{- if eq $provider "envoy-gateway" }}
     kubectl get envoyextensionpolicies,clienttrafficpolicies,backendtrafficpolicies {{ $ours }} \
       {{ include "epd-sidecar.attach.conditions" . }}
   Each has to say Accepted=True. The reason Conflicted means that another policy has the same target.
{{- if .Values.attach.accessLog.enabled }}
   The access log takes effect once the Gateway names its EnvoyProxy. That is merged into the one of the GatewayClass, if
   there is one; a Gateway that names one already needs a copy of spec.telemetry.accessLog in that one instead:
     kubectl get gateway -n {{ $namespace }} {{ $gateway }} -o jsonpath='{.spec.infrastructure.parametersRef.name}'
     kubectl patch gateway -n {{ $namespace }} {{ $gateway }} --type merge -p '{"spec":{"infrastructure":{"parametersRef":{"group":"gateway.envoyproxy.io","kind":"EnvoyProxy","name":"{{ include "epd-sidecar.attach.name" (dict "root" . "namespace" $namespace) }}"}}}}'
{{- end }}
{{- if include "epd-sidecar.attach.observes" . }}
   prompt_token_parity needs an Envoy Gateway whose extProc has shadowMode; one that drops the field fails every answer:
     kubectl explain envoyextensionpolicies.spec.extProc.shadowMode
{{- end }}
{{- else if eq $provider "istio" }}
     istioctl proxy-config listeners -n {{ $namespace }} deployment/{{ $gateway }}-istio -o json | grep ext_proc/epd-sidecar
   Istio writes no condition for an EnvoyFilter: no line means that it did not match, or that Envoy refused the listener
   (istioctl proxy-status, and istiod's log). The filter's cluster has to exist:
     istioctl proxy-config clusters -n {{ $namespace }} deployment/{{ $gateway }}-istio --fqdn {{ include "epd-sidecar.istio.host" (dict "root" . "name" (include "epd-sidecar.fullname" .) "namespace" .Release.Namespace) }}
{{- else if eq $provider "kgateway" }}
     kubectl get gatewayextensions,trafficpolicies,listenerpolicies,backendconfigpolicies {{ $ours }} \
       {{ include "epd-sidecar.attach.conditions" . }}
   Each has to say Accepted=True, and policies Attached=True.
{{- else if eq $provider "agentgateway" }}
     kubectl get agentgatewaypolicies {{ $ours }} \
       {{ include "epd-sidecar.attach.conditions" . }}
   Each has to say Accepted=True and Attached=True.
{{- else if eq $provider "gke" }}
     kubectl get gcproutingextensions,gcpbackendpolicies,healthcheckpolicies {{ $ours }} \
       {{ include "epd-sidecar.attach.conditions" . }}
   No condition may be False; the load balancer takes some minutes.
{{- end }}
{{- if and (eq .Values.attach.bodyMode "Buffered") (not .Values.attach.listenerPolicy.enabled) }}
   attach.listenerPolicy.enabled is false, so the listeners' buffers are yours: at their default of 32 KiB or 1 MiB, Envoy
   answers a body with media 413 before the sidecar sees it. {{ include "epd-sidecar.attach.bufferBytes" . }} bytes are right.
{{- end }}
{{- if and .Values.phases.enabled .Values.phases.gateway.name (not (include "epd-sidecar.attach.shared" .)) }}
   The internal Gateway {{ .Values.phases.gateway.name }} is this release's alone: the phase routes of another release there would match the same
   requests.
{{- end }}
{{- if eq (include "epd-sidecar.attach.targetKind" .) "HTTPRoute" }}
   The targeted HTTPRoutes are the client route: their backend has to be the internal Gateway's Service
   {{- with include "epd-sidecar.phases.service" . | fromJson }}{{ if .name }} ({{ .name }} in {{ .namespace }}, port {{ .port }}){{ end }}{{ end }}, and no
   filter of theirs may remove EPP-Profile, which the sidecar sets before they run.
{{- end }}
{{ if has $provider (list "kgateway" "gke") }}
3. Send a request, and look for outcome, stage and error in the sidecar's own log, by request_id: the record does not
   reach the log of this gateway.
{{- else }}
3. Send a request, and look for outcome, stage and error in the gateway's access log; a request without the sidecar's
   record did not pass through it.
{{- end }}
{{- end -}}
