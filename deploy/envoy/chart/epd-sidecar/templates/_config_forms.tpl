{{/*
deploy/envoy/chart/config_forms.py writes this file from the sidecar's settings. Dotted paths below `config`,
and the form of _forms.tpl that each value has; [] stands for the items of a list.
*/}}

{{- define "epd-sidecar.config.forms" -}}
ext_proc.listen: listenAddress
ext_proc.max_request_body_size: megabytes
ext_proc.read_timeout: positiveDuration
ext_proc.request_deadline: positiveDuration
ext_proc.drain_timeout: duration
admin.listen: adminAddress
limits.max_in_flight_requests: count
limits.max_in_flight_bytes: megabytes
gateway.address: baseUrl
gateway.timeout: positiveDuration
gateway.max_idle_conns_per_host: count
gateway.idle_conn_timeout: positiveDuration
headers.strip[]: strippedHeader
observability.metadata_namespace: metadataNamespace
pipeline.forward_response_headers[]: forwardedHeader
{{- end -}}

{{- define "epd-sidecar.config.stepForms" -}}
replace-media-urls:
  download_timeout: positiveDuration
  max_concurrent_downloads: count
  max_multimodal_entries: countOrUnlimited
  max_download_size: megabytes
  max_image_download_size: megabytes
  max_audio_download_size: megabytes
  max_video_download_size: megabytes
  allowed_image_content_types[]: contentType
  allowed_audio_content_types[]: contentType
  allowed_video_content_types[]: contentType
  allowed_domains[]: domain
render:
  address: baseUrl
  timeout: positiveDuration
  max_total_tokens: countOrUnlimited
  max_total_placeholder_tokens: countOrUnlimited
  max_idle_conns_per_host: count
  idle_conn_timeout: positiveDuration
conditional-decode:
  timeout: positiveDuration
encode:
  max_parallel: count
  timeout: positiveDuration
prefill:
  timeout: positiveDuration
prefill-decode:
  timeout: positiveDuration
  bootstrap_port: port
{{- end -}}

{{- define "epd-sidecar.config.order" -}}
- replace-media-urls
- render
- conditional-decode
- encode
- prefill
- decode
- prefill-decode
{{- end -}}

{{- define "epd-sidecar.config.headers" -}}
untouchable:
- connection
- content-encoding
- content-length
- content-type
- expect
- host
- keep-alive
- te
- traceparent
- trailer
- transfer-encoding
- upgrade
- x-request-id
envoyPrefixes:
- x-envoy-
- x-forwarded-
credentials:
- authorization
- cookie
- proxy-authorization
- x-api-key
control:
- epp-profile
- x-epd-hop
- x-epd-phase-token
{{- end -}}
