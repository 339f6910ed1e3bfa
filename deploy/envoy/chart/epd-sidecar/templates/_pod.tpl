{{/* The pod, the same in the Deployment and in the DaemonSet. */}}
{{- define "epd-sidecar.pod" -}}
metadata:
  annotations:
    checksum/config: {{ include "epd-sidecar.config" . | sha256sum | quote }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- /* Without the chart's version, or every release of the chart would restart the pods. */}}
    {{- toYaml (mergeOverwrite
      (deepCopy .Values.commonLabels)
      .Values.podLabels
      (include "epd-sidecar.selectorLabels" . | fromYaml)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "epd-sidecar.serviceAccountName" . | quote }}
  automountServiceAccountToken: false
  # A Service with an unlucky name would otherwise put SIDECAR__ variables into the environment.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "epd-sidecar.terminationGracePeriodSeconds" . }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: sidecar
      image: {{ include "epd-sidecar.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/epd-sidecar/sidecar.yaml]
      {{- if or .Values.phaseToken.existingSecret .Values.extraEnv }}
      env:
        {{- with .Values.phaseToken }}
        {{- if .existingSecret }}
        - name: SIDECAR__GATEWAY__PHASE_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ .existingSecret | quote }}
              key: {{ .key | quote }}
        {{- end }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      {{- $port := include "epd-sidecar.extProcPort" . }}
      {{- $adminPort := include "epd-sidecar.adminPort" . }}
      {{- $onSocket := include "epd-sidecar.listensOnSocket" . }}
      {{- if or $adminPort (not $onSocket) }}
      ports:
        {{- if not $onSocket }}
        - name: grpc-ext-proc
          containerPort: {{ $port }}
          protocol: TCP
        {{- end }}
        {{- if $adminPort }}
        - name: metrics
          containerPort: {{ $adminPort }}
          protocol: TCP
        {{- end }}
      {{- end }}
      {{- /* The kubelet's gRPC probes speak neither TLS nor to sockets; there the admin listener tells the same. */}}
      {{- $byHttp := or $onSocket (include "epd-sidecar.tlsEnabled" .) }}
      startupProbe:
        {{- if $byHttp }}
        httpGet: {path: /healthz, port: metrics}
        {{- else }}
        grpc: {port: {{ $port }}}
        {{- end }}
        periodSeconds: 1
        timeoutSeconds: 2
        failureThreshold: 60
      # Liveness does not depend on load, and does not end with readiness: a restart would lose what is being drained.
      livenessProbe:
        {{- if $byHttp }}
        httpGet: {path: /healthz, port: metrics}
        {{- else }}
        grpc: {port: {{ $port }}}
        {{- end }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      # Two checks, two seconds apart, fit into the 5 s that the sidecar serves on after SIGTERM.
      readinessProbe:
        {{- if $byHttp }}
        httpGet: {path: /readyz, port: metrics}
        {{- else }}
        grpc: {port: {{ $port }}, service: envoy.service.ext_proc.v3.ExternalProcessor}
        {{- end }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      {{- with .Values.lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/epd-sidecar
          readOnly: true
        {{- if .Values.tls.existingSecret }}
        - name: tls
          mountPath: {{ include "epd-sidecar.tlsDirectory" . | quote }}
          readOnly: true
        {{- end }}
        {{- if $onSocket }}
        - name: socket
          mountPath: {{ include "epd-sidecar.socketDirectory" . | quote }}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "epd-sidecar.fullname" . | quote }}
    {{- with .Values.tls.existingSecret }}
    - name: tls
      secret:
        secretName: {{ . | quote }}
    {{- end }}
    {{- if $onSocket }}
    - name: socket
      hostPath:
        path: {{ .Values.uds.hostPath | quote }}
        # Not created here: the kubelet would give it to root, and the sidecar could not write.
        type: Directory
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and .Values.topologySpreadConstraints (not .Values.uds.enabled) }}
  topologySpreadConstraints:
    {{- $own := dict "matchLabels" (include "epd-sidecar.selectorLabels" . | fromYaml) }}
    {{- range .Values.topologySpreadConstraints }}
    - {{- set (deepCopy .) "labelSelector" (default $own .labelSelector) | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
{{- end -}}
