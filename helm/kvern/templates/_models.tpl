{{/* What clients call a pool's model. */}}
{{- define "kvern.modelName" -}}
{{- if .name -}}{{ .name }}
{{- else if eq .source "hub" -}}{{ .hub.id }}
{{- else if eq .source "bundled" -}}smollm2
{{- else -}}{{ required "model.name: say what clients call a model that is a whole volume" (get . .source).path | base | trimSuffix ".gguf" }}
{{- end -}}
{{- end }}

{{/* What a service's --model says. Takes (list pool-name model). */}}
{{- define "kvern.modelReference" -}}
{{- $model := index . 1 -}}
{{- if eq $model.source "hub" -}}{{ required "model.hub.id: owner/name" $model.hub.id }}
{{- else if eq $model.source "bundled" -}}smollm2
{{- else -}}{{ printf "/models/%s/%s" (index . 0) (get $model $model.source).path | trimSuffix "/" }}
{{- end -}}
{{- end }}

{{/* The pools whose models a router's tokenizer serves: the first of each model name. As a JSON list of names. */}}
{{- define "kvern.tokenizerPools" -}}
{{- $pools := include "kvern.pools" . | fromJson -}}
{{- $first := dict -}}
{{- range $name := keys $pools | sortAlpha -}}
{{- $model := include "kvern.modelName" (get $pools $name).model -}}
{{- if not (hasKey $first $model) -}}{{- $_ := set $first $model $name -}}{{- end -}}
{{- end -}}
{{- values $first | sortAlpha | toJson -}}
{{- end }}

{{/* Volumes with models. Takes (list root {pool-name: model}). */}}
{{- define "kvern.modelVolumes" -}}
{{- $root := index . 0 -}}
{{- $hub := false }}
{{- range $name, $model := index . 1 }}
{{- if eq $model.source "pvc" }}
- name: model-{{ $name }}
  persistentVolumeClaim:
    claimName: {{ required "model.pvc.claimName: which claim holds the model" $model.pvc.claimName }}
    readOnly: true
{{- else if eq $model.source "image" }}
- name: model-{{ $name }}
  image:
    reference: {{ required "model.image.reference: which image holds the model" $model.image.reference }}
    pullPolicy: IfNotPresent
{{- else if eq $model.source "hub" }}
{{- $hub = true }}
{{- end }}
{{- end }}
{{- if $hub }}
- name: hub
{{- with $root.Values.hub }}
  {{- if or .claim.existing .claim.create }}
  persistentVolumeClaim:
    claimName: {{ .claim.existing | default (printf "%s-hub" (include "kvern.fullname" $root)) }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .cacheSize }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where services see them. Takes {pool-name: model}. */}}
{{- define "kvern.modelMounts" -}}
{{- $hub := false }}
{{- range $name, $model := . }}
{{- if has $model.source (list "pvc" "image") }}
- name: model-{{ $name }}
  mountPath: /models/{{ $name }}
  readOnly: true
{{- else if eq $model.source "hub" }}
{{- $hub = true }}
{{- end }}
{{- end }}
{{- if $hub }}
- name: hub
  mountPath: /var/cache/kvern/huggingface
  readOnly: true
{{- end }}
{{- end }}

{{/* Variables of services that read a hub model. Takes {pool-name: model}. */}}
{{- define "kvern.modelEnv" -}}
{{- $hub := false }}
{{- range . }}{{ if eq .source "hub" }}{{ $hub = true }}{{ end }}{{ end }}
{{- if $hub }}
- name: HF_HOME
  value: /var/cache/kvern/huggingface
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}

{{/* Init containers that fetch hub models. Takes (list root {pool-name: model} option...), options of kvern download. */}}
{{- define "kvern.downloads" -}}
{{- $root := index . 0 -}}
{{- range $name, $model := index . 1 }}
{{- if eq $model.source "hub" }}
- name: download-{{ $name }}
  image: {{ include "kvern.image" (list $root $root.Values.images.services) }}
  imagePullPolicy: {{ $root.Values.images.pullPolicy }}
  command: {{ concat (list "kvern" "download") (slice $ 2) (list $model.hub.id) | toJson }}
  env:
    - name: HF_HOME
      value: /var/cache/kvern/huggingface
    {{- with $root.Values.hub.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- with $root.Values.hub.token }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
  resources: {{- include "kvern.resources" $root.Values.hub.resources | trim | nindent 4 }}
  securityContext: {{- include "kvern.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    - name: cache
      mountPath: /var/cache/kvern
    - name: hub
      mountPath: /var/cache/kvern/huggingface
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}
{{- end }}
