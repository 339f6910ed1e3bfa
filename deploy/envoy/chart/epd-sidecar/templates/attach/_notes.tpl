{{/* What to do and to look at after an installation, per gateway. */}}
{{- define "epd-sidecar.attach.notes" -}}
{{- $provider := .Values.attach.provider -}}
{{- $namespace := include "epd-sidecar.attach.namespace" . -}}
{{- $gateway := default "GATEWAY" (get (default dict (first (include "epd-sidecar.attach.gatewayRefs" . | fromYamlArray))) "name") -}}
{{- $ours := printf "-n %s -l app.kubernetes.io/instance=%s" $namespace .Release.Name -}}
2. Check that the gateway has accepted the filter:
{{- if eq $provider "envoy-gateway" }}
     kubectl get envoyextensionpolicies {{ $ours }} \
       -o jsonpath='{range .items[*].status.ancestors[*].conditions[*]}{.type}={.status} {.message}{"\n"}{end}'
   It has to say Accepted=True. Conflicted means that another EnvoyExtensionPolicy has the same target.
{{- if .Values.attach.accessLog.enabled }}
   The access log takes effect once the Gateway names it (one that names an EnvoyProxy already needs a copy of
   spec.telemetry.accessLog in that one instead):
     kubectl patch gateway -n {{ $namespace }} {{ $gateway }} --type merge -p '{"spec":{"infrastructure":{"parametersRef":{"group":"gateway.envoyproxy.io","kind":"EnvoyProxy","name":"{{ include "epd-sidecar.fullname" . }}"}}}}'
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
     kubectl get gatewayextensions,trafficpolicies,listenerpolicies {{ $ours }} -o yaml | grep -B1 -A6 'type: \(Accepted\|Attached\)'
   All have to say status: "True".
{{- else if eq $provider "agentgateway" }}
     kubectl get agentgatewaypolicies {{ $ours }} -o yaml | grep -B1 -A6 'type: \(Accepted\|Attached\)'
   All have to say status: "True".
{{- else if eq $provider "gke" }}
     kubectl describe gcproutingextensions {{ $ours }}
   Accepted and ResolvedRefs have to be True; the load balancer takes some minutes.
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
