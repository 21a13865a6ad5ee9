{{/* Takes (list root pool-name pool). */}}
{{- define "kvern.engine" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $pool := index . 2 -}}
{{- $models := dict $name $pool.model -}}
{{- $gpu := $pool.gpu -}}
{{- $images := $root.Values.images -}}
{{- $shm := include "kvern.mebibytes" $pool.engine.shm -}}
{{- $resources := deepCopy $pool.engine.resources -}}
{{- range $amounts := $resources -}}
{{- $_ := set $amounts "memory" (printf "%dMi" (add $shm (include "kvern.mebibytes" $amounts.memory))) -}}
{{- if $gpu.count }}{{ $_ := set $amounts $gpu.resource $gpu.count }}{{ end -}}
{{- end -}}
{{ include "kvern.container" (list $root "engine" (ternary $images.engineGpu $images.engineCpu (gt (int $gpu.count) 0))) }}
args:
  - --listen=unix:/run/kvern/engine.sock
  {{- include "kvern.commonFlags" (list $root 9401) | nindent 2 }}
  {{- include "kvern.optional" (list 2 (include "kvern.tlsFlags" $root)) }}
  {{- include "kvern.optional" (list 2 (include "kvern.redisPasswordFlags" $root)) }}
  - {{ printf "--model=%s" (include "kvern.modelReference" (list $name $pool.model)) | quote }}
  - {{ printf "--served-model-name=%s" (include "kvern.modelName" $pool.model) | quote }}
  - --device={{ ternary "cuda" "cpu" (gt (int $gpu.count) 0) }}
  {{- if gt (int $gpu.count) 1 }}
  - --tensor-parallel-size={{ $gpu.count }}
  {{- end }}
  - --advertise={{ ternary "[$(POD_IP)]" "$(POD_IP)" (hasPrefix "[" $root.Values.listenAddress) }}:50051
  - --replica-id=$(POD_NAME)
  {{- if $root.Values.sidecars.native }}
  # The detokenizer is gone when SIGTERM comes here.
  - --drain-delay-s=0
  - --drain-timeout-s=5
  {{- else }}
  # SIGTERM comes to the detokenizer at the same moment; its stream closes when it has drained.
  - --drain-delay-s={{ $pool.drain.delaySeconds }}
  - --drain-timeout-s={{ add $pool.drain.timeoutSeconds 5 }}
  {{- end }}
  {{- if and $pool.smg.enabled $pool.smg.kvEvents }}
  {{- include "kvern.smgFlags" $pool.smg | nindent 2 }}
  {{- end }}
  {{- include "kvern.optional" (list 2 (include "kvern.digestKeyFlags" $root)) }}
  {{- include "kvern.optional" (list 2 (include "kvern.flags" $pool.engine.settings)) }}
{{ include "kvern.list" (list "env" (include "kvern.podEnv" .) (include "kvern.redisEnv" (list $root "engine")) (include "kvern.modelEnv" $models) (include "kvern.yaml" $pool.engine.env)) }}
ports:
  - {name: status-sidecar, containerPort: 9401}
{{ include "kvern.startupProbe" (list $root "status-sidecar" "/readyz" $pool.startup.timeoutSeconds) }}
{{ include "kvern.probes" (list $root "status-sidecar") }}
resources: {{- include "kvern.resources" $resources | trim | nindent 2 }}
{{ include "kvern.list" (list "volumeMounts" (include "kvern.mounts" .) "- {name: shm, mountPath: /dev/shm}" (include "kvern.redisMounts" $root) (include "kvern.secretMounts" (list $root "tls" "redis-auth" "digest-key")) (include "kvern.modelMounts" $models)) }}
{{- end }}

{{- define "kvern.podEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}

{{/* What detokenizer and engine must be told alike. Takes a pool's smg. */}}
{{- define "kvern.smgFlags" -}}
- {{ printf "--smg-salt=%s" .salt | quote }}
- --{{ ternary "" "no-" .kvEvents }}smg-kv-events
{{- end }}
