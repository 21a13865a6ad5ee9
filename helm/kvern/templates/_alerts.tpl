{{/* A histogram's bound as its `le` label spells it: 2 is "2.0". */}}
{{- define "kvern.bucketBound" -}}
{{- $bound := toString . -}}
{{- ternary $bound (printf "%s.0" $bound) (contains "." $bound) -}}
{{- end }}

{{/* Replicas by model, as a JSON object: those of all its pools, and of an autoscaled one the least. */}}
{{- define "kvern.wantedReplicas" -}}
{{- $wanted := dict -}}
{{- range include "kvern.pools" . | fromJson -}}
{{- $model := include "kvern.modelName" .model -}}
{{- $count := ternary .replicas .autoscaling.minReplicas (eq .autoscaling.kind "none") | int -}}
{{- $_ := set $wanted $model (add (get $wanted $model | default 0) $count) -}}
{{- end -}}
{{- toJson $wanted -}}
{{- end }}

{{/* Whether the services are told of certificate files. */}}
{{- define "kvern.hasCertificates" -}}
{{- $redis := .Values.redis -}}
{{- or .Values.tls.enabled (and (eq $redis.mode "external") (ne $redis.external.ca.name "")) -}}
{{- end }}

{{/* A rule that alerts. Takes (list root alert expr labels). */}}
{{- define "kvern.alert" -}}
{{- $root := index . 0 -}}
{{- $alert := index . 1 -}}
- alert: {{ $alert.alert }}
  expr: |-
    {{ index . 2 }}
  for: {{ $alert.for | default "2m" }}
  labels:
    {{- merge (dict) (index . 3) (include "kvern.alertLabels" $root | fromYaml) | toYaml | nindent 4 }}
  annotations:
    summary: {{ $alert.summary | quote }}
    description: {{ $alert.description | quote }}
    runbook_url: {{ $root.Values.alerts.runbookUrl }}#{{ lower $alert.alert }}
{{- end }}

{{/* A rule that says that an alert can see nothing. Takes (list root alert matchers). */}}
{{- define "kvern.noData" -}}
{{- $root := index . 0 -}}
{{- $alert := index . 1 -}}
{{- $matchers := index . 2 -}}
{{- $absent := list -}}
{{- range $alert.present }}{{ $absent = append $absent (printf "absent(%s{%s})" . $matchers) }}{{ end -}}
- alert: KvernNoData
  expr: |-
    {{ join " or " $absent }}
  for: 15m
  labels:
    {{- merge (dict "severity" "warning" "blind" $alert.alert) (include "kvern.alertLabels" $root | fromYaml) | toYaml | nindent 4 }}
  annotations:
    summary: {{ $alert.alert }} sees nothing
    description: {{ printf "%s was not scraped, so the alert cannot fire." (join " or " $alert.present) | quote }}
    runbook_url: {{ $root.Values.alerts.runbookUrl }}#kvernnodata
{{- end }}

{{/* Labels of all alerts. */}}
{{- define "kvern.alertLabels" -}}
namespace: {{ .Release.Namespace }}
release: {{ .Release.Name }}
{{- with .Values.alerts.alertLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
