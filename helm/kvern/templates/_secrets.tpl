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
{{- if .Values.tls.clientCa.name }}
{{- if not .Values.tls.enabled }}{{ fail "tls.enabled: without it nobody is asked for a certificate of tls.clientCa" }}{{ end }}
- --tls-client-ca=/etc/kvern/client-ca/ca.crt
{{- end }}
{{- end }}

{{- define "kvern.ticketFlags" -}}
{{- if .Values.tickets.secret.name }}
- --ticket-key-file=/etc/kvern/tickets/keys
{{- end }}
{{- end }}

{{/* Who may call a router. */}}
{{- define "kvern.authFlags" -}}
{{- $auth := .Values.auth -}}
{{- if $auth.apiKeys.secret.name }}
- --api-keys=/etc/kvern/api-keys/keys.yaml
{{- end }}
{{- if or $auth.jwt.issuer $auth.jwt.audience $auth.jwt.jwks }}
- {{ printf "--jwt-issuer=%s" (required "auth.jwt.issuer: whose tokens are taken" $auth.jwt.issuer) | quote }}
- {{ printf "--jwt-audience=%s" (required "auth.jwt.audience: whom tokens must be for" $auth.jwt.audience) | quote }}
- {{ printf "--jwt-jwks=%s" (required "auth.jwt.jwks: where the issuer's keys are" $auth.jwt.jwks) | quote }}
- {{ printf "--jwt-tenant-claim=%s" $auth.jwt.tenantClaim | quote }}
- {{ printf "--jwt-roles-claim=%s" $auth.jwt.rolesClaim | quote }}
{{- end }}
{{- if and $auth.saltSecret.name (not $auth.tenants.name) }}
{{- fail "auth.tenants.name: without it there are no tenants for auth.saltSecret" }}
{{- end }}
{{- if $auth.tenants.name }}
- --tenants=/etc/kvern/tenants/tenants.yaml
- --salt-secret-file=/etc/kvern/salt/secret
{{- end }}
{{- end }}

{{/* Of tokenizers and engines. */}}
{{- define "kvern.digestKeyFlags" -}}
{{- if include "kvern.hasDigestKey" . }}
- --digest-key-file=/etc/kvern/digest-key/key
{{- end }}
{{- end }}

{{- define "kvern.hasDigestKey" -}}
{{- if or .Values.auth.tenants.name .Values.auth.digestKey.name }}true{{ end -}}
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
{{- $_ := set $given "api-keys" $values.auth.apiKeys.secret.name -}}
{{- $_ := set $given "tenants" $values.auth.tenants.name -}}
{{- $_ := set $given "salt" $values.auth.tenants.name -}}
{{- $_ := set $given "digest-key" (include "kvern.hasDigestKey" (index . 0)) -}}
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
{{- $auth := $root.Values.auth -}}
{{- if and (eq $component "router") $auth.apiKeys.secret.name }}
- name: api-keys
  secret:
    secretName: {{ $auth.apiKeys.secret.name }}
    items:
      - {key: {{ $auth.apiKeys.secret.key }}, path: keys.yaml}
{{- end }}
{{- if and (eq $component "router") $auth.tenants.name }}
- name: tenants
  {{ $auth.tenants.kind }}:
    {{ ternary "secretName" "name" (eq $auth.tenants.kind "secret") }}: {{ $auth.tenants.name }}
    items:
      - {key: {{ $auth.tenants.key }}, path: tenants.yaml}
- name: salt
  secret:
    secretName: {{ required "auth.saltSecret.name: tenants need it" $auth.saltSecret.name }}
    items:
      - {key: {{ $auth.saltSecret.key }}, path: secret}
{{- end }}
{{- if include "kvern.hasDigestKey" $root }}
- name: digest-key
  secret:
    secretName: {{ required "auth.digestKey.name: tenants need it" $auth.digestKey.name }}
    items:
      - {key: {{ $auth.digestKey.key }}, path: key}
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
