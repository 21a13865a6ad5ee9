{{/* Status ports of services, by name, and labels that tell pods apart. Takes the monitor's values. */}}
{{- define "kvern.scrapes" -}}
{{- $interval := .interval -}}
{{- range list "status" "status-sidecar" "status-gateway" }}
- port: {{ . }}
  path: /metrics
  interval: {{ $interval }}
{{- end }}
{{- end }}

{{- define "kvern.monitorSelector" -}}
matchLabels:
  app.kubernetes.io/name: kvern
  app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
