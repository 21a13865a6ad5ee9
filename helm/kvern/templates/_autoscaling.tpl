{{/* How many there may be, under an autoscaler's names for it. Takes (list name autoscaling least most). */}}
{{- define "kvern.scaleBounds" -}}
{{- $name := index . 0 -}}
{{- with index . 1 -}}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s: autoscaling.minReplicas %v is above maxReplicas %v" $name .minReplicas .maxReplicas) }}
{{- end -}}
{{ index $ 2 }}: {{ .minReplicas }}
{{ index $ 3 }}: {{ .maxReplicas }}
{{- end }}
{{- end }}

{{/*
A KEDA ScaledObject on a sum over this release's routers. Takes (list root labels deployment autoscaling metric target).
*/}}
{{- define "kvern.scaledObject" -}}
{{- $root := index . 0 -}}
{{- $name := index . 2 -}}
{{- $autoscaling := index . 3 -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels: {{- include "kvern.labels" (index . 1) | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ $name }}}
  {{- include "kvern.scaleBounds" (list $name $autoscaling "minReplicaCount" "maxReplicaCount") | nindent 2 }}
  pollingInterval: {{ $autoscaling.keda.pollingInterval }}
  cooldownPeriod: {{ $autoscaling.scaleDownSeconds }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown: {stabilizationWindowSeconds: {{ $autoscaling.scaleDownSeconds }}}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $autoscaling.keda.serverAddress | quote }}
        query: {{ printf "sum(%s)" (index . 4) | quote }}
        threshold: {{ index . 5 | quote }}
{{- end }}

{{/* PromQL matchers of this release's series, as the monitors label them. */}}
{{- define "kvern.ownSeries" -}}
namespace="{{ .Release.Namespace }}",job="{{ .Release.Name }}"
{{- end }}
