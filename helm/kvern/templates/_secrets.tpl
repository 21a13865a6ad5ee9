{{/* Certificates, passwords and keys, as files in folders of their own: so what changes in a Secret changes there. */}}

{{/* What listens in TLS. */}}
{{- define "kvern.tlsFlags" -}}
{{- if .Values.tls.enabled }}
- --tls-cert=/etc/kvern/tls/tls.crt
- --tls-key=/etc/kvern/tls/tls.key
{{- end }}
{{- end }}

{{/* Of whom clients of routers and gateways need a certificate. */}}
{{- define "kvern.clientCaFlags" -}}
{{- if and .Values.tls.enabled .Values.tls.clientCa.name }}
- --tls-client-ca=/etc/kvern/client-ca/ca.crt
{{- end }}
{{- end }}

{{- define "kvern.ticketFlags" -}}
{{- if .Values.tickets.secret.name }}
- --ticket-key-file=/etc/kvern/tickets/keys
{{- end }}
{{- end }}

{{- define "kvern.redisPasswordFlags" -}}
{{- if and .Values.redis.auth.secret (ne .Values.redis.mode "none") }}
- --redis-password-file=/etc/kvern/redis-auth/password
{{- end }}
{{- end }}

{{- define "kvern.routerIdentity" -}}
{{- .Values.tls.routerIdentity | default (printf "%s-router.%s.svc" (include "kvern.fullname" .) .Release.Namespace) -}}
{{- end }}

{{/* Mounts of what the pod's volumes below hold. Takes (list root name...). */}}
{{- define "kvern.secretMounts" -}}
{{- $values := (index . 0).Values -}}
{{- $given := dict "tls" $values.tls.enabled "client-ca" (and $values.tls.enabled $values.tls.clientCa.name) -}}
{{- $_ := set $given "tickets" $values.tickets.secret.name -}}
{{- $_ := set $given "redis-auth" (and $values.redis.auth.secret (ne $values.redis.mode "none")) -}}
{{- range rest . }}
{{- if get $given . }}
- name: {{ . }}
  mountPath: /etc/kvern/{{ . }}
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{/* Takes (list root "router" or "replica"). */}}
{{- define "kvern.secretVolumes" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $tls := $root.Values.tls -}}
{{- if $tls.enabled }}
- name: tls
  secret:
    secretName: {{ required (printf "tls.%s.secret: which Secret holds the certificate" $component) (get $tls $component).secret }}
{{- if and (eq $component "router") $tls.clientCa.name }}
- name: client-ca
  secret:
    secretName: {{ $tls.clientCa.name }}
    items:
      - {key: {{ $tls.clientCa.key }}, path: ca.crt}
{{- end }}
{{- end }}
{{- with $root.Values.tickets.secret }}
{{- if .name }}
- name: tickets
  secret:
    secretName: {{ .name }}
    items:
      - {key: {{ .key }}, path: keys}
{{- end }}
{{- end }}
{{- if and $root.Values.redis.auth.secret (ne $root.Values.redis.mode "none") }}
- name: redis-auth
  secret:
    secretName: {{ $root.Values.redis.auth.secret }}
    items:
      - {key: {{ ternary "router" "engine" (eq $component "router") }}-password, path: password}
{{- end }}
{{- end }}

{{/* A gRPC or HTTP port's appProtocol, in TLS where there is TLS. Takes (list root app-protocol). */}}
{{- define "kvern.appProtocol" -}}
{{- $isPlain := has (index . 1) (list "kubernetes.io/h2c" "http") -}}
{{- ternary "https" (index . 1) (and (index . 0).Values.tls.enabled $isPlain) -}}
{{- end }}
