{{/* The release's name and -kvern: no rule that drops either, so names of two releases are never equal. */}}
{{- define "kvern.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-kvern" .Release.Name) (eq .Release.Name "kvern")) -}}
{{- if gt (len $name) 35 -}}
{{- printf "%s-%s" (trunc 26 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{- define "kvern.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "kvern.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{/* Labels that select; they never change. Takes (list root component [pool]). */}}
{{- define "kvern.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: kvern
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
kvern/pool: {{ index . 2 }}
{{- end }}
{{- end }}

{{/* All labels of an object. Takes (list root component [pool]). */}}
{{- define "kvern.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvern.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Takes (list root image). */}}
{{- define "kvern.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The pools, each with what `replica` says where the pool says nothing, as a JSON object by name. */}}
{{- define "kvern.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := (.Values.pools | default (dict "default" (dict))) -}}
{{- $_ := set $pools $name (mergeOverwrite (deepCopy $.Values.replica) (deepCopy $pool)) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end }}

{{/* MiB of a quantity in Mi or Gi. */}}
{{- define "kvern.mebibytes" -}}
{{- if hasSuffix "Gi" . -}}
{{- mul 1024 (trimSuffix "Gi" . | int) -}}
{{- else -}}
{{- trimSuffix "Mi" . | int -}}
{{- end -}}
{{- end }}

{{/* From SIGTERM to the end of the last call. Takes a drain. */}}
{{- define "kvern.drainSeconds" -}}
{{- add .delaySeconds .timeoutSeconds -}}
{{- end }}

{{- define "kvern.graceSeconds" -}}
{{- add (include "kvern.drainSeconds" .) .marginSeconds -}}
{{- end }}

{{/* How long a new pod may take before its rollout counts as failed. Takes a pool or the router's values. */}}
{{- define "kvern.progressDeadlineSeconds" -}}
{{- add .startup.timeoutSeconds .startup.pullSeconds (include "kvern.graceSeconds" .drain) -}}
{{- end }}

{{/* Settings of a service as flags. */}}
{{- define "kvern.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else }}
- {{ printf "--%s=%s" $name (ternary $value (toJson $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Flags that every service gets. Takes (list root status-port). */}}
{{- define "kvern.commonFlags" -}}
{{- $observability := (index . 0).Values.observability -}}
- --status-listen={{ (index . 0).Values.listenAddress }}:{{ index . 1 }}
- --log-level={{ $observability.logLevel }}
{{- with $observability.otlpEndpoint }}
- --otlp-endpoint={{ . }}
- --trace-sample-ratio={{ $observability.sampleRatio }}
{{- end }}
{{- end }}

{{/* Requests and limits, of which both must be there. */}}
{{- define "kvern.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{- $amounts := get $ $kind | default dict }}
{{- range list "cpu" "memory" }}
{{- if not (hasKey $amounts .) }}{{ fail (printf "resources.%s.%s: must be set" $kind .) }}{{ end }}
{{- end }}
{{ $kind }}:
  {{- range $name, $amount := $amounts }}
  {{ $name }}: {{ $amount | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* YAML of a value that is not empty. */}}
{{- define "kvern.yaml" -}}
{{- with . }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* A list under a key, left out where all parts are empty. Takes (list key part...), each part YAML of a list. */}}
{{- define "kvern.list" -}}
{{- $key := first . -}}
{{- with compact (rest .) -}}
{{ $key }}:
  {{- range . }}
  {{- trim . | nindent 2 }}
  {{- end }}
{{- end -}}
{{- end }}

{{/* Text on lines of its own, or nothing. Takes (list indentation text). */}}
{{- define "kvern.optional" -}}
{{- with trim (index . 1) }}{{ nindent (int (index $ 0)) . }}{{ end -}}
{{- end }}

{{/* Who may reach a port: NetworkPolicyPeers, or everybody where there are none. */}}
{{- define "kvern.from" -}}
{{- with . }}
from: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
