{{/* Status ports of services, by name, and labels that tell pods apart. Takes (list root monitor-values). */}}
{{- define "kvern.scrapes" -}}
{{- $tls := (index . 0).Values.tls -}}
{{- $interval := (index . 1).interval -}}
{{- range list "status" "status-sidecar" "status-gateway" }}
- port: {{ . }}
  path: /metrics
  interval: {{ $interval }}
  {{- if $tls.enabled }}
  scheme: https
  # Pods are scraped by their addresses, which are in no certificate.
  tlsConfig: {insecureSkipVerify: true}
  {{- end }}
  {{- if eq . "status-sidecar" }}
  relabelings:
    # A Service that gives a port by number gives one to Redis too.
    - {sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component], regex: redis, action: drop}
  {{- end }}
{{- end }}
{{- end }}

{{- define "kvern.monitorSelector" -}}
matchLabels:
  app.kubernetes.io/name: kvern
  app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
