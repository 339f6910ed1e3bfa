{{/*
What neither Kubernetes nor the sidecar would take of this pod and its Service. Each problem is a template that prints what
is wrong and what to do, or nothing; the chart's validation collects them.
*/}}
{{- define "epd-sidecar.pod.problems" -}}
{{- range $name := list
  "objectName" "environmentToken" "environmentTwice" "socketPath" "socketDirectory"
  "annotationTwice" "volumeTwice" "mountTwice" "scaledWithoutRequest" -}}
{{- include (printf "epd-sidecar.pod.problem.%s" $name) $ | trim }}
{{ end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.objectName" -}}
{{- $name := include "epd-sidecar.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
the objects would be named {{ $name }}, and the name of a Service begins with a letter: choose another {{ ternary "fullnameOverride" "name for the release, or set fullnameOverride" (not (empty .Values.fullnameOverride)) }}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.environmentToken" -}}
{{- range .Values.extraEnv -}}
{{- if eq (upper .name) "SIDECAR__GATEWAY__PHASE_TOKEN" -}}
{{- if $.Values.phaseToken.existingSecret -}}
the phase token is set in phaseToken.existingSecret and in extraEnv: remove one of them
{{- break -}}
{{- else if and .value (not (hasPrefix "file:/" .value)) -}}
extraEnv would show the value of {{ .name }} to everybody who may read pods: put it into a Secret and name that in phaseToken.existingSecret
{{- break -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.environmentTwice" -}}
{{- $seen := list -}}
{{- range .Values.extraEnv -}}
{{- if has .name $seen -}}
extraEnv sets {{ .name }} twice: remove one of them
{{- break -}}
{{- end -}}
{{- $seen = append $seen .name -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.socketPath" -}}
{{- if include "epd-sidecar.listensOnSocket" . -}}
{{- $path := trimPrefix "unix:" (trim .Values.config.ext_proc.listen) -}}
{{- if or (hasSuffix "/" $path) (regexMatch "(^|/)[.]{1,2}(/|$)" $path) -}}
config.ext_proc.listen {{ .Values.config.ext_proc.listen | quote }} is not the path of a file: write one without . and .. in it, for example unix:/run/epd-sidecar/ext_proc.sock
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.socketDirectory" -}}
{{- if include "epd-sidecar.listensOnSocket" . -}}
{{- $directory := include "epd-sidecar.socketDirectory" . -}}
{{- if regexMatch "^/*((bin|boot|dev|etc|lib|lib64|opt|proc|sbin|sys|usr)(/|$)|$)" $directory -}}
config.ext_proc.listen: uds.hostPath would be mounted at {{ $directory }}, over files of the container; use a directory of its own, for example unix:/run/epd-sidecar/ext_proc.sock
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.annotationTwice" -}}
{{- if hasKey .Values.podAnnotations "checksum/config" -}}
podAnnotations sets checksum/config, by which a change of config rolls the pods: use another name
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.volumeTwice" -}}
{{- $seen := list "config" "tls" "socket" -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $seen -}}
extraVolumes: {{ .name }} is the name of another volume of the pod; use another name
{{- break -}}
{{- end -}}
{{- $seen = append $seen .name -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.mountTwice" -}}
{{- $seen := list "/etc/epd-sidecar" -}}
{{- if .Values.tls.existingSecret }}{{ $seen = append $seen (include "epd-sidecar.tlsDirectory" .) }}{{ end -}}
{{- if include "epd-sidecar.listensOnSocket" . }}{{ $seen = append $seen (include "epd-sidecar.socketDirectory" .) }}{{ end -}}
{{- range .Values.extraVolumeMounts -}}
{{- $path := clean .mountPath -}}
{{- if has $path $seen -}}
extraVolumeMounts: something is mounted at {{ $path }} already; use another mountPath
{{- break -}}
{{- end -}}
{{- $seen = append $seen $path -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.pod.problem.scaledWithoutRequest" -}}
{{- if and .Values.autoscaling.enabled (not .Values.uds.enabled) (not (default dict .Values.resources.requests).cpu) -}}
autoscaling.enabled compares CPU with resources.requests.cpu, which is missing: set it, best to "1"
{{- end -}}
{{- end -}}
