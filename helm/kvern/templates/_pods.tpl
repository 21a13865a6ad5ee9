{{- define "kvern.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.security }}
{{- range $name := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- $id := get $.Values.security $name }}
{{- if not (kindIs "invalid" $id) }}
{{ $name }}: {{ $id | int64 }}
{{- end }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvern.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* What all pods say. Takes (list root component-values). */}}
{{- define "kvern.podSpec" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
serviceAccountName: {{ include "kvern.serviceAccountName" $root }}
automountServiceAccountToken: false
# Kubernetes' own KVERN_* variables would be taken for settings.
enableServiceLinks: false
securityContext: {{- include "kvern.podSecurity" $root | nindent 2 }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Takes (list root component [pool]). */}}
{{- define "kvern.topologySpread" -}}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "kvern.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}

{{/* A service's image, command, hardening. Takes (list root service image). */}}
{{- define "kvern.container" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
image: {{ include "kvern.image" (list $root (index . 2)) }}
imagePullPolicy: {{ $root.Values.images.pullPolicy }}
command: [python, -P, -m, kvern.services.{{ index . 1 }}]
securityContext: {{- include "kvern.containerSecurity" $root | nindent 2 }}
{{- end }}

{{- define "kvern.mounts" -}}
- name: sockets
  mountPath: /run/kvern
- name: cache
  mountPath: /var/cache/kvern
- name: tmp
  mountPath: /tmp
{{- end }}

{{/* Volumes of every pod of services. Takes the cache's size. */}}
{{- define "kvern.volumes" -}}
- name: sockets
  emptyDir: {sizeLimit: 16Mi}
- name: cache
  emptyDir: {sizeLimit: {{ . }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}

{{/*
Liveness and readiness at a status port. A wedged engine is told after 5 s of its own clock, and unready two probes later.
Nothing is probed before the startup probe has passed. Takes (list root port-name).
*/}}
{{- define "kvern.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: {{ index . 1 }}, scheme: {{ include "kvern.scheme" (index . 0) | upper }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ index . 1 }}, scheme: {{ include "kvern.scheme" (index . 0) | upper }}}
  periodSeconds: 2
  timeoutSeconds: 1
  failureThreshold: 2
{{- end }}

{{/* Takes (list root port-name path timeout-seconds). */}}
{{- define "kvern.startupProbe" -}}
startupProbe:
  httpGet: {path: {{ index . 2 }}, port: {{ index . 1 }}, scheme: {{ include "kvern.scheme" (index . 0) | upper }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ceil (divf (index . 3) 5) | int }}
{{- end }}

{{/* How HTTP is spoken at status ports and gateways. */}}
{{- define "kvern.scheme" -}}
{{- ternary "https" "http" .Values.tls.enabled -}}
{{- end }}

{{/* Takes (list root "router" or "engine"). */}}
{{- define "kvern.redisEnv" -}}
{{- $root := index . 0 -}}
{{- $external := $root.Values.redis.external -}}
{{- $auth := $root.Values.redis.auth -}}
{{- $user := ternary (printf "://%s@" (get $auth (printf "%sUser" (index . 1)))) "://" (ne $auth.secret "") -}}
{{- if eq $root.Values.redis.mode "own" }}
- name: KVERN_REDIS
  value: {{ printf "redis://%s-redis:6379" (include "kvern.fullname" $root) | replace "://" $user }}
{{- else if eq $root.Values.redis.mode "external" }}
- name: KVERN_REDIS
  {{- if $external.secret.name }}
  {{- if $auth.secret }}{{ fail "redis: auth.secret goes with external.url, not with a URL that has a password" }}{{ end }}
  valueFrom:
    secretKeyRef: {name: {{ $external.secret.name }}, key: {{ $external.secret.key }}}
  {{- else }}
  {{- $url := required "redis.external: give url, or the secret that holds it" $external.url }}
  {{- if $external.ca.name }}
  {{- $url = printf "%s%sssl_ca_certs=/etc/kvern/redis/ca.crt" $url (ternary "&" "?" (contains "?" $url)) }}
  {{- end }}
  value: {{ $url | replace "://" $user | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "kvern.redisMounts" -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.ca.name }}
- name: redis-ca
  mountPath: /etc/kvern/redis
  readOnly: true
{{- end }}
{{- end }}

{{- define "kvern.redisVolumes" -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.ca.name }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.external.ca.name }}
    items:
      - {key: {{ .Values.redis.external.ca.key }}, path: ca.crt}
{{- end }}
{{- end }}
