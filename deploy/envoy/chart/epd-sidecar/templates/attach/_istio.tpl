{{/* Envoy configuration that the EnvoyFilters carry, with Envoy's own field names. */}}

{{/* Name that Istio gives Envoy's cluster of the sidecar's Service. */}}
{{- define "epd-sidecar.istio.cluster" -}}
outbound|{{ include "epd-sidecar.extProcPort" . }}||{{ include "epd-sidecar.istio.host" (dict "root" . "name" (include "epd-sidecar.fullname" .) "namespace" .Release.Namespace) }}
{{- end -}}

{{/* Host of a Service in Istio's registry. Takes a dict: root, name, namespace. */}}
{{- define "epd-sidecar.istio.host" -}}
{{ .name }}.{{ .namespace }}.svc.{{ .root.Values.attach.istio.clusterDomain }}
{{- end -}}

{{/* The filter. Its name is its own, so that settings which others make per route for theirs do not reach it. */}}
{{- define "epd-sidecar.istio.filter" -}}
name: envoy.filters.http.ext_proc/epd-sidecar
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
  stat_prefix: epd_sidecar
  grpc_service:
    envoy_grpc: {cluster_name: {{ include "epd-sidecar.istio.cluster" . | quote }}}
  # Fail closed. A request that skips the sidecar reaches decode without KV of its media.
  failure_mode_allow: false
  # The sidecar is down, not broken: clients may retry.
  status_on_error: {code: ServiceUnavailable}
  processing_mode:
    request_header_mode: SEND
    request_body_mode: {{ ternary "BUFFERED" "FULL_DUPLEX_STREAMED" (eq .Values.attach.bodyMode "Buffered") }}
    # FULL_DUPLEX_STREAMED requires it.
    request_trailer_mode: SEND
    # The answer, SSE included, never passes the sidecar; prefill-decode sees its headers.
    response_header_mode: {{ ternary "SEND" "SKIP" (not (empty (include "epd-sidecar.attach.seesResponse" .))) }}
    response_body_mode: NONE
    response_trailer_mode: SKIP
  message_timeout: {{ include "epd-sidecar.attach.messageTimeout" . }}
  # Without it the record never reaches the access log.
  metadata_options: {receiving_namespaces: {untyped: [{{ .Values.config.observability.metadata_namespace | quote }}]}}
  # What the sidecar never writes must not be writable: these would break the request's framing.
  mutation_rules:
    disallow_system: true
    disallow_expression: {regex: "^(transfer-encoding|connection|x-forwarded-.*)$"}
    disallow_is_error: true
{{- end -}}

{{/* Reads the prompt tokens that decode reports; nothing waits for it. */}}
{{- define "epd-sidecar.istio.observer" -}}
name: envoy.filters.http.ext_proc/prompt-token-parity
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
  stat_prefix: prompt_token_parity
  grpc_service:
    envoy_grpc: {cluster_name: {{ include "epd-sidecar.istio.cluster" . | quote }}}
  observability_mode: true
  # The sidecar being away is no reason to lose an answer.
  failure_mode_allow: true
  processing_mode:
    request_header_mode: SKIP
    request_body_mode: NONE
    request_trailer_mode: SKIP
    response_header_mode: SEND
    response_body_mode: STREAMED
    # They may be the end of an answer.
    response_trailer_mode: SEND
  metadata_options: {forwarding_namespaces: {untyped: [{{ .Values.config.observability.metadata_namespace | quote }}]}}
{{- end -}}

{{/* Settings of the listener's connection manager. */}}
{{- define "epd-sidecar.istio.manager" -}}
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
  {{- if .Values.attach.listenerPolicy.enabled }}
  # Runs while the sidecar works and while decode generates in silence.
  stream_idle_timeout: {{ include "epd-sidecar.attach.streamIdleTimeout" . }}
  # The sidecar and the workers must read the same path.
  normalize_path: true
  merge_slashes: true
  path_with_escaped_slashes_action: REJECT_REQUEST
  # A client's x-request-id is kept (the sidecar validates it), so that logs can be joined.
  preserve_external_request_id: true
  http_protocol_options: {enable_trailers: true}
  {{- with include "epd-sidecar.attach.strippedHeaders" . }}
  # Before routing and before every filter: no client chooses a phase or presents a token.
  early_header_mutation_extensions:
    - name: envoy.http.early_header_mutation.header_mutation
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation
        mutations:
          {{- range . | fromYamlArray }}
          - remove: {{ . }}
          {{- end }}
  {{- end }}
  {{- end }}
  {{- if .Values.attach.accessLog.enabled }}
  # Next to the log that the mesh is configured for, if it is.
  access_log:
    - name: envoy.access_loggers.file
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
        path: /dev/stdout
        log_format:
          json_format:
            {{- include "epd-sidecar.attach.logFormat" (dict "root" . "filter" "envoy.filters.http.ext_proc/epd-sidecar" "record" true) | nindent 12 }}
  {{- end }}
{{- end -}}

{{/* The same for the internal Gateway, which only the sidecar and the client route reach. */}}
{{- define "epd-sidecar.istio.internalManager" -}}
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
  stream_idle_timeout: {{ include "epd-sidecar.attach.streamIdleTimeout" . }}
  preserve_external_request_id: true
  http_protocol_options: {enable_trailers: true}
{{- end -}}
