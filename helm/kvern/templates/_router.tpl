{{/* Takes (list root {pool-name: model}). */}}
{{- define "kvern.tokenizer" -}}
{{- $root := index . 0 -}}
{{- $models := index . 1 -}}
{{- $drain := $root.Values.router.drain -}}
{{- $tokenizer := $root.Values.router.tokenizer -}}
{{ include "kvern.container" (list $root "tokenizer" $root.Values.images.services) }}
args:
  - --listen=unix:/run/kvern/tokenizer.sock
  {{- include "kvern.commonFlags" (list $root 9401) | nindent 2 }}
  {{- include "kvern.optional" (list 2 (include "kvern.tlsFlags" $root)) }}
  {{- range $i, $name := keys $models | sortAlpha }}
  {{- $model := get $models $name }}
  {{- $reference := include "kvern.modelReference" (list $name $model) }}
  {{- if eq $i 0 }}
  - {{ printf "--model=%s" $reference | quote }}
  - {{ printf "--served-model-name=%s" (include "kvern.modelName" $model) | quote }}
  {{- else }}
  - {{ printf "--more-models=%s=%s" (include "kvern.modelName" $model) $reference | quote }}
  {{- end }}
  {{- end }}
  {{- if $root.Values.sidecars.native }}
  - --drain-delay-s=0
  {{- else }}
  # The router is told to end at the same moment, and takes calls for its own delay.
  - --drain-delay-s={{ add $drain.delaySeconds 5 }}
  {{- end }}
  - --drain-timeout-s=5
  {{- include "kvern.optional" (list 2 (include "kvern.digestKeyFlags" $root)) }}
  {{- include "kvern.optional" (list 2 (include "kvern.flags" $tokenizer.settings)) }}
{{ include "kvern.list" (list "env" (include "kvern.modelEnv" $models) (include "kvern.yaml" $tokenizer.env)) }}
ports:
  - {name: status-sidecar, containerPort: 9401}
{{ include "kvern.startupProbe" (list $root "status-sidecar" "/readyz" $root.Values.router.startup.timeoutSeconds) }}
{{ include "kvern.probes" (list $root "status-sidecar") }}
resources: {{- include "kvern.resources" $tokenizer.resources | trim | nindent 2 }}
{{ include "kvern.list" (list "volumeMounts" (include "kvern.mounts" .) (include "kvern.secretMounts" (list $root "tls" "digest-key")) (include "kvern.modelMounts" $models)) }}
{{- end }}

{{/* A second main container, not a sidecar: it drains together with the router, whose client it is. */}}
{{- define "kvern.gateway" -}}
{{- $drain := .Values.router.drain -}}
{{ include "kvern.container" (list . "gateway" .Values.images.services) }}
args:
  - --listen={{ .Values.listenAddress }}:8000
  {{- include "kvern.commonFlags" (list . 9402) | nindent 2 }}
  {{- include "kvern.optional" (list 2 (include "kvern.tlsFlags" .)) }}
  {{- include "kvern.optional" (list 2 (include "kvern.clientCaFlags" .)) }}
  - --router=unix:/run/kvern/router.sock
  # A second less than the router: what is taken here is taken there.
  - --drain-delay-s={{ max 0 (sub $drain.delaySeconds 1) }}
  - --drain-timeout-s={{ $drain.timeoutSeconds }}
  {{- include "kvern.optional" (list 2 (include "kvern.flags" .Values.gateway.settings)) }}
{{ include "kvern.list" (list "env" (include "kvern.yaml" .Values.gateway.env)) }}
ports:
  - {name: http, containerPort: 8000}
  - {name: status-gateway, containerPort: 9402}
{{ include "kvern.startupProbe" (list . "status-gateway" "/healthz" .Values.router.startup.timeoutSeconds) }}
{{ include "kvern.probes" (list . "status-gateway") }}
resources: {{- include "kvern.resources" .Values.gateway.resources | trim | nindent 2 }}
{{ include "kvern.list" (list "volumeMounts" (include "kvern.mounts" .) (include "kvern.secretMounts" (list . "tls" "client-ca"))) }}
{{- end }}
