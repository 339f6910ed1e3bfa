{{/*
What one value may look like, with the rules and the words of sidecar.config.values. Each form takes a value and prints
what is wrong with it and what to write instead, or nothing. values.schema.json keeps to kinds and choices, since its
refusals name patterns and hide everything that is said here.
*/}}

{{/* A value as a message shows it: a scalar of at most 80 characters, anything else by its kind only. */}}
{{- define "epd-sidecar.quoted" -}}
{{- if kindIs "string" . -}}
{{- $text := printf "%+q" (ternary (printf "%s..." (trunc 77 .)) . (gt (len .) 80)) -}}
{{- regexReplaceAll "\\\\u00([0-9a-f]{2})" $text "\\x${1}" -}}
{{- else if kindIs "slice" . -}}
a list
{{- else if kindIs "map" . -}}
a mapping
{{- else -}}
{{- include "epd-sidecar.text" . -}}
{{- end -}}
{{- end -}}

{{/* A scalar as text: whole numbers as they were written, not 1e+06; nothing for a list or a mapping. */}}
{{- define "epd-sidecar.text" -}}
{{- if kindIs "string" . -}}
{{- trim . -}}
{{- else if kindIs "float64" . -}}
{{- ternary (int64 . | toString) (toString .) (and (eq (floor .) .) (lt . 9e15) (gt . -9e15)) -}}
{{- else if not (or (kindIs "slice" .) (kindIs "map" .)) -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/*
A value and its form, as a line `key: what is wrong`, or nothing. Takes a dict: in, the mapping it is in; path, its dotted
path there, with [] behind a list whose items have the form or the rest of the path; form; prefix of the key in messages.
*/}}
{{- define "epd-sidecar.checked" -}}
{{- $outer := . -}}
{{- $parts := splitn "[]" 2 .path -}}
{{- $value := .in -}}
{{- range $key := splitList "." $parts._0 -}}
{{- $value = ternary $value dict (kindIs "map" $value) -}}
{{- $value = ternary (get $value $key) nil (hasKey $value $key) -}}
{{- end -}}
{{- $key := print .prefix $parts._0 -}}
{{- $form := print "epd-sidecar.form." .form -}}
{{- if not (contains "[]" .path) -}}
{{- if not (kindIs "invalid" $value) -}}
{{- with include $form $value | trim }}
{{ $key }}: {{ . }}
{{- end -}}
{{- end -}}
{{- else if kindIs "slice" $value -}}
{{- range $index, $item := $value -}}
{{- if $parts._1 -}}
{{- $prefix := printf "%s[%d]." $key $index -}}
{{- include "epd-sidecar.checked" (dict "in" $item "path" (trimPrefix "." $parts._1) "form" $outer.form "prefix" $prefix) -}}
{{- else -}}
{{- with include $form $item | trim }}
{{ $key }}[{{ $index }}]: {{ . }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Durations, sizes and numbers */}}

{{- define "epd-sidecar.form.duration" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if eq $text "0" -}}
{{- else if regexMatch "^[0-9]+(\\.[0-9]+)?$" $text -}}
{{ include "epd-sidecar.quoted" . }} has no unit; add a unit, for example "{{ trunc 20 $text }}s"
{{- else if not (regexMatch (printf "^(?:%s)+$" (include "epd-sidecar.durationPart" .)) $text) -}}
{{ include "epd-sidecar.quoted" . }} is not a duration; write one such as "30s", "500ms" or "1m30s"
{{- else if gt (include "epd-sidecar.seconds" (dict "value" $text) | int64) 2592000 -}}
{{ include "epd-sidecar.quoted" $text }} is too long; the limit is 720h
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.positiveDuration" -}}
{{- $wrong := include "epd-sidecar.form.duration" . -}}
{{- if $wrong -}}
{{ $wrong }}
{{- else if not (regexMatch "[1-9]" (include "epd-sidecar.text" .)) -}}
0 is not allowed here; write a time limit such as "30s"
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.megabytes" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if not (or (kindIs "float64" .) (regexMatch "^-?[0-9]{1,18}(\\.[0-9]{1,18})?$" $text)) -}}
{{ include "epd-sidecar.quoted" . }} is not a size; write a number of MB without a unit, for example 64
{{- else if or (lt (float64 $text) 9.5367431640625e-07) (gt (float64 $text) 1048576.0) -}}
{{ include "epd-sidecar.quoted" . }} MB is out of range; use more than 0 and at most 1048576
{{- end -}}
{{- end -}}

{{/* Takes a dict: value, lowest, highest (0: none). */}}
{{- define "epd-sidecar.wholeNumber" -}}
{{- $text := include "epd-sidecar.text" .value -}}
{{- if not (regexMatch "^-?[0-9]{1,18}(\\.0+)?$" $text) -}}
{{ include "epd-sidecar.quoted" .value }} is not a whole number
{{- else if lt (float64 $text) (float64 .lowest) -}}
{{ include "epd-sidecar.quoted" .value }} is too small; use at least {{ .lowest }}
{{- else if and .highest (gt (float64 $text) (float64 .highest)) -}}
{{ include "epd-sidecar.quoted" .value }} is too large; use at most {{ .highest }}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.count" -}}
{{- include "epd-sidecar.wholeNumber" (dict "value" . "lowest" 1 "highest" 0) -}}
{{- end -}}

{{- define "epd-sidecar.form.countOrUnlimited" -}}
{{- include "epd-sidecar.wholeNumber" (dict "value" . "lowest" 0 "highest" 0) -}}
{{- end -}}

{{- define "epd-sidecar.form.port" -}}
{{- include "epd-sidecar.wholeNumber" (dict "value" . "lowest" 1 "highest" 65535) -}}
{{- end -}}

{{/* Addresses */}}

{{/* Takes a dict: text, lowest. */}}
{{- define "epd-sidecar.portOfAddress" -}}
{{- if or (not (regexMatch "^[0-9]{1,5}$" .text)) (gt (atoi .text) 65535) (lt (atoi .text) .lowest) -}}
{{ include "epd-sidecar.quoted" .text }} is not a port; use {{ .lowest }}..65535
{{- end -}}
{{- end -}}

{{/* "true" for an IP address or a host name. An IPv6 address is looked at, not read. */}}
{{- define "epd-sidecar.isHost" -}}
{{- $label := "[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?" -}}
{{- $byte := "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- $last := last (splitList "." .) -}}
{{- if regexMatch (printf "^(?:%s\\.){3}%s$" $byte $byte) . -}}
true
{{- else if regexMatch "^[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:.]*(%[0-9a-z]+)?$" . -}}
true
{{- else if and (le (len .) 253) (regexMatch (printf "^%s(?:\\.%s)*$" $label $label) .) (not (regexMatch "^[0-9]+$" $last)) -}}
true
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.listenAddress" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if hasPrefix "unix:" $text -}}
{{- $path := trimPrefix "unix:" $text -}}
{{- if or (not (hasPrefix "/" $path)) (gt (len $path) 107) (regexMatch "[^ -~]" $path) -}}
{{ include "epd-sidecar.quoted" $text }} is not a socket path; write "unix:" and an absolute path of up to 107 bytes
{{- end -}}
{{- else -}}
{{- $port := regexFind ":[^:]*$" $text -}}
{{- $host := trimSuffix $port $text -}}
{{- $bracketed := and (hasPrefix "[" $host) (hasSuffix "]" $host) -}}
{{- $name := ternary (trimSuffix "]" (trimPrefix "[" $host)) $host $bracketed -}}
{{- if or (not $port) (ne $bracketed (contains ":" $name)) (not (include "epd-sidecar.isHost" (lower $name))) -}}
{{ include "epd-sidecar.quoted" $text }} is not an address to listen on; write host:port, such as "0.0.0.0:9002" or "[::]:9002"
{{- else -}}
{{- include "epd-sidecar.portOfAddress" (dict "text" (trimPrefix ":" $port) "lowest" 0) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.adminAddress" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if hasPrefix "unix:" $text -}}
unix sockets are not supported here; write host:port, or "" to switch it off
{{- else if $text -}}
{{- include "epd-sidecar.form.listenAddress" $text -}}
{{- end -}}
{{- end -}}

{{/* Nothing of an address that may hold a password is repeated. An empty one is missing, which is said elsewhere. */}}
{{- define "epd-sidecar.form.baseUrl" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- $example := "write a base URL such as http://host:8000" -}}
{{- $authority := regexReplaceAll "^(?i:https?)://([^/?#]*).*$" $text "${1}" -}}
{{- $host := regexReplaceAll "^(\\[[^]]*\\]|[^:]*).*$" $authority "${1}" -}}
{{- $port := trimPrefix $host $authority -}}
{{- if not $text -}}
{{- else if contains "@" $text -}}
credentials in an address are not supported; {{ $example }}
{{- else if regexMatch "[^!-~]|\\\\" $text -}}
{{ include "epd-sidecar.quoted" $text }} has characters that an address cannot have; {{ $example }}
{{- else if not (and (regexMatch "^(?i:https?)://" $text) (include "epd-sidecar.isHost" (trimAll "[]" (lower $host)))) -}}
{{ include "epd-sidecar.quoted" $text }} is not an http or https address with a host; {{ $example }}
{{- else if regexMatch "[?#]" $text -}}
an address has no query or fragment; {{ $example }}
{{- else if $port -}}
{{- include "epd-sidecar.portOfAddress" (dict "text" (trimPrefix ":" $port) "lowest" 1) -}}
{{- end -}}
{{- end -}}

{{/* Names */}}

{{/* Takes the name in lower case. */}}
{{- define "epd-sidecar.headerName" -}}
{{- if not (regexMatch "^[!#$%&'+.^_`|~0-9a-z-]+$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a header name; write one name without wildcards, colon or spaces
{{- end -}}
{{- end -}}

{{/* "true" for a header whose loss or rewrite Envoy refuses. */}}
{{- define "epd-sidecar.belongsToEnvoy" -}}
{{- $known := include "epd-sidecar.config.headers" . | fromYaml -}}
{{- $found := has . $known.untouchable -}}
{{- range $known.envoyPrefixes }}{{ $found = or $found (hasPrefix . $) }}{{ end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{- define "epd-sidecar.form.strippedHeader" -}}
{{- $name := lower (include "epd-sidecar.text" .) -}}
{{- $wrong := include "epd-sidecar.headerName" $name -}}
{{- if $wrong -}}
{{ $wrong }}
{{- else if include "epd-sidecar.belongsToEnvoy" $name -}}
{{ include "epd-sidecar.quoted" $name }} cannot be stripped: the request would break; remove it from the list
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.forwardedHeader" -}}
{{- $name := lower (include "epd-sidecar.text" .) -}}
{{- $known := include "epd-sidecar.config.headers" . | fromYaml -}}
{{- $wrong := include "epd-sidecar.headerName" $name -}}
{{- if $wrong -}}
{{ $wrong }}
{{- else if or (include "epd-sidecar.belongsToEnvoy" $name) (has $name $known.control) -}}
{{ include "epd-sidecar.quoted" $name }} cannot be forwarded: the sidecar sets it itself; remove it from the list
{{- else if has $name $known.credentials -}}
{{ include "epd-sidecar.quoted" $name }} cannot be forwarded: it would replace the client's own; remove it from the list
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.contentType" -}}
{{- $text := lower (include "epd-sidecar.text" .) -}}
{{- if not (regexMatch "^[a-z]+/[a-z0-9][a-z0-9.+-]{0,63}$" $text) -}}
{{ include "epd-sidecar.quoted" $text }} is not a content type; write image/png, without parameters or wildcard
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.domain" -}}
{{- $text := lower (include "epd-sidecar.text" .) | trimSuffix "." -}}
{{- if not (include "epd-sidecar.isHost" $text) -}}
{{ include "epd-sidecar.quoted" $text }} is not a host name; write images.example.com, without scheme, port or wildcard
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.metadataNamespace" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if not (regexMatch "^[A-Za-z0-9._-]+$" $text) -}}
{{ include "epd-sidecar.quoted" $text }} is not a metadata namespace; use letters, digits and . _ -
{{- end -}}
{{- end -}}

{{/* Values of the chart's own */}}

{{- define "epd-sidecar.form.quantity" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?(m|[KMGTPE]i?|k|e[0-9]+)?$" $text) -}}
{{ include "epd-sidecar.quoted" . }} is not a quantity of Kubernetes; write one such as 3Gi, or 500m of a core
{{- else if not (regexMatch "[1-9]" $text) -}}
{{ include "epd-sidecar.quoted" . }} is nothing; write more than 0, or leave it out
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.podsOrPercentage" -}}
{{- $text := include "epd-sidecar.text" . -}}
{{- if not (regexMatch "^(0|[1-9][0-9]{0,8}|(0|[1-9][0-9]{0,2})%)?$" $text) -}}
{{ include "epd-sidecar.quoted" . }} is neither a number of pods nor a percentage; write one such as 1 or "50%"
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.prometheusDuration" -}}
{{- if not (regexMatch "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a duration of Prometheus; write one such as 30s
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.digest" -}}
{{- if not (regexMatch "^(sha256:[0-9a-f]{64})?$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a digest; write sha256: and 64 hexadecimal digits, as the registry printed it
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.directory" -}}
{{- if not (regexMatch "^/." .) -}}
{{ include "epd-sidecar.quoted" . }} is not an absolute directory; write one such as /run/epd-sidecar
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.urlPath" -}}
{{- if not (regexMatch "^/[!-~]*$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a path; begin it with /, and leave out spaces
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.required" -}}
{{- if not . -}}
must not be empty
{{- end -}}
{{- end -}}

{{/* Of an object: empty where the value may be left out. */}}
{{- define "epd-sidecar.form.objectName" -}}
{{- $label := "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?" -}}
{{- if or (gt (len .) 253) (not (regexMatch (printf "^(%s([.]%s)*)?$" $label $label) .)) -}}
{{ include "epd-sidecar.quoted" . }} is not a name of Kubernetes; use lower-case letters, digits, - and ., with a letter or digit at both ends
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.requiredName" -}}
{{- include "epd-sidecar.form.required" . -}}
{{- include "epd-sidecar.form.objectName" . -}}
{{- end -}}

{{- define "epd-sidecar.form.serviceName" -}}
{{- if not (regexMatch "^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not the name of a Service; use up to 63 lower-case letters, digits and -, with a letter or digit at both ends
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.requiredServiceName" -}}
{{- include "epd-sidecar.form.required" . -}}
{{- include "epd-sidecar.form.serviceName" . -}}
{{- end -}}

{{- define "epd-sidecar.form.namespaceName" -}}
{{- if not (regexMatch "^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a namespace; use up to 63 lower-case letters, digits and -, with a letter or digit at both ends
{{- end -}}
{{- end -}}

{{/* Part of a name, or the whole of one whose dots become dashes. */}}
{{- define "epd-sidecar.form.override" -}}
{{- if not (regexMatch "^([a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?)?$" .) -}}
{{ include "epd-sidecar.quoted" . }} cannot be part of a name; use up to 63 lower-case letters, digits, - and ., with a letter or digit at both ends
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.secretKey" -}}
{{- if not (regexMatch "^[A-Za-z0-9._-]{1,253}$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a key of a Secret; use letters, digits and . _ -
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.serverName" -}}
{{- if not (regexMatch "^([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)?$" .) -}}
{{ include "epd-sidecar.quoted" . }} is not a name in a certificate; write a host name such as epd-sidecar.inference.svc
{{- end -}}
{{- end -}}

{{- define "epd-sidecar.form.clusterDomain" -}}
{{- if or (not .) (include "epd-sidecar.form.objectName" .) -}}
{{ include "epd-sidecar.quoted" . }} is not the domain of a cluster; write one such as cluster.local
{{- end -}}
{{- end -}}

{{/* Values of the chart's own keys. */}}
{{- define "epd-sidecar.values.forms" -}}
nameOverride: override
fullnameOverride: override
image.digest: digest
imagePullSecrets[].name: requiredName
render.address: baseUrl
attach.targetRefs[].name: objectName
attach.targetRefs[].sectionName: objectName
attach.namespace: namespaceName
attach.gateways[].name: requiredName
attach.gateways[].sectionName: objectName
attach.tls.caConfigMap: objectName
attach.tls.caSecret: objectName
attach.istio.clusterDomain: clusterDomain
phases.gateway.name: objectName
phases.gateway.namespace: namespaceName
phases.gateway.sectionName: objectName
phases.service.name: serviceName
phases.service.namespace: namespaceName
phases.encode.namespace: namespaceName
phases.encode.healthPath: urlPath
phases.prefill.namespace: namespaceName
phases.prefill.healthPath: urlPath
phases.decode.namespace: namespaceName
phases.decode.healthPath: urlPath
phases.clientRoute.paths[].value: urlPath
tls.existingSecret: objectName
tls.caKey: secretKey
tls.serverName: serverName
phaseToken.existingSecret: objectName
phaseToken.key: secretKey
uds.hostPath: directory
serviceAccount.name: objectName
priorityClassName: objectName
extraEnv[].name: required
podDisruptionBudget.minAvailable: podsOrPercentage
podDisruptionBudget.maxUnavailable: podsOrPercentage
serviceMonitor.interval: prometheusDuration
serviceMonitor.scrapeTimeout: prometheusDuration
{{- end -}}

{{/* A line for every value that has not its form. */}}
{{- define "epd-sidecar.problem.forms" -}}
{{- range $path, $form := include "epd-sidecar.values.forms" . | fromYaml -}}
{{- include "epd-sidecar.checked" (dict "in" $.Values "path" $path "form" $form "prefix" "") -}}
{{- end -}}
{{- range $phase := list "encode" "prefill" "decode" -}}
{{- $form := ternary "requiredServiceName" "requiredName" (eq (get $.Values.phases $phase).kind "Service") -}}
{{- include "epd-sidecar.checked" (dict "in" $.Values "path" (printf "phases.%s.name" $phase) "form" $form "prefix" "") -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- $amounts := get (default dict $.Values.resources) $kind | default dict -}}
{{- range $name, $_ := $amounts -}}
{{- include "epd-sidecar.checked" (dict "in" $amounts "path" $name "form" "quantity" "prefix" (printf "resources.%s." $kind)) -}}
{{- end -}}
{{- end -}}
{{- range $path, $form := include "epd-sidecar.config.forms" . | fromYaml -}}
{{- include "epd-sidecar.checked" (dict "in" $.Values.config "path" $path "form" $form "prefix" "config.") -}}
{{- end -}}
{{- $forms := include "epd-sidecar.config.stepForms" . | fromYaml -}}
{{- range $index, $step := .Values.config.pipeline.steps -}}
{{- $prefix := printf "config.pipeline.steps[%d].params." $index -}}
{{- range $path, $form := default dict (get $forms $step.type) -}}
{{- include "epd-sidecar.checked" (dict "in" (default dict $step.params) "path" $path "form" $form "prefix" $prefix) -}}
{{- end -}}
{{- end -}}
{{- end -}}
