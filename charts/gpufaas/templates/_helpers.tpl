{{- define "gpufaas.name" -}}
{{- if contains "gpufaas" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-gpufaas" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* What pods of a part are found by: "part" and "root". */ -}}
{{- define "gpufaas.selector" -}}
app.kubernetes.io/name: gpufaas
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "gpufaas.labels" -}}
{{ include "gpufaas.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- define "gpufaas.image" -}}
{{ .root.Values.image.repository }}-{{ .part }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "gpufaas.etcd" -}}
{{- if and .Values.etcd.endpoints .Values.etcd.bundled.enabled }}
{{- fail "etcd.endpoints and etcd.bundled.enabled exclude each other: set etcd.bundled.enabled=false to use yours" }}
{{- end }}
{{- if .Values.etcd.endpoints }}{{ join "," .Values.etcd.endpoints }}
{{- else if .Values.etcd.bundled.enabled }}{{ include "gpufaas.name" . }}-etcd:2379
{{- else }}{{ fail "there is no etcd: set etcd.endpoints, or etcd.bundled.enabled=true" }}
{{- end }}
{{- end }}

{{- define "gpufaas.tokenSecret" -}}{{ .Values.secrets.token.existing | default (printf "%s-cluster" (include "gpufaas.name" .)) }}{{- end }}
{{- define "gpufaas.keySecret" -}}{{ .Values.secrets.key.existing | default (printf "%s-cluster" (include "gpufaas.name" .)) }}{{- end }}
{{- define "gpufaas.authSecret" -}}{{ .Values.secrets.auth.existing | default (printf "%s-auth" (include "gpufaas.name" .)) }}{{- end }}

{{- /* Options that every service has: "root". */ -}}
{{- define "gpufaas.args" -}}
- --etcd={{ include "gpufaas.etcd" .root }}
- --etcd-prefix={{ .root.Values.etcd.prefix }}
{{- if .root.Values.etcd.tls.secretName }}
- --etcd-ca=/etc/gpufaas/etcd/ca.crt
- --etcd-cert=/etc/gpufaas/etcd/tls.crt
- --etcd-key=/etc/gpufaas/etcd/tls.key
{{- end }}
{{- if .root.Values.etcd.auth.user }}
- --etcd-user={{ .root.Values.etcd.auth.user }}
- --etcd-password-file=/etc/gpufaas/etcd-password/password
{{- end }}
- --token-file=/etc/gpufaas/token/cluster-token
{{- if .root.Values.tls.secretName }}
- --tls-ca=/etc/gpufaas/tls/ca.crt
- --tls-cert=/etc/gpufaas/tls/tls.crt
- --tls-key=/etc/gpufaas/tls/tls.key
{{- end }}
- --id={{ .id | default "$(POD_NAME)" }}
{{- end }}

{{- define "gpufaas.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: token, mountPath: /etc/gpufaas/token, readOnly: true}
{{- if .root.Values.etcd.tls.secretName }}
- {name: etcd-tls, mountPath: /etc/gpufaas/etcd, readOnly: true}
{{- end }}
{{- if .root.Values.etcd.auth.user }}
- {name: etcd-password, mountPath: /etc/gpufaas/etcd-password, readOnly: true}
{{- end }}
{{- if .root.Values.tls.secretName }}
- {name: tls, mountPath: /etc/gpufaas/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "gpufaas.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: token
  secret:
    secretName: {{ include "gpufaas.tokenSecret" .root }}
    items: [{key: cluster-token, path: cluster-token}]
{{- if .root.Values.etcd.tls.secretName }}
- {name: etcd-tls, secret: {secretName: {{ .root.Values.etcd.tls.secretName | quote }}}}
{{- end }}
{{- if .root.Values.etcd.auth.user }}
- {name: etcd-password, secret: {secretName: {{ required "etcd.auth.user needs etcd.auth.passwordSecretName" .root.Values.etcd.auth.passwordSecretName | quote }}}}
{{- end }}
{{- if .root.Values.tls.secretName }}
- {name: tls, secret: {secretName: {{ .root.Values.tls.secretName | quote }}}}
{{- end }}
{{- end }}

{{- define "gpufaas.env" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}

{{- define "gpufaas.credentials" -}}
{{- if .Values.objectStore.credentialsSecretName }}
envFrom:
  - secretRef: {name: {{ .Values.objectStore.credentialsSecretName | quote }}}
{{- end }}
{{- end }}

{{- define "gpufaas.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpufaas.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Alive, and ready: "port". A service that is not ready (no etcd, no leader) is not restarted for it. */ -}}
{{- define "gpufaas.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{- /* Apart from each other, where there are machines enough: "part" and "root". */ -}}
{{- define "gpufaas.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "gpufaas.selector" . | nindent 12 }}
{{- end }}

{{- define "gpufaas.pulls" -}}
{{- with .Values.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . | quote }}}
  {{- end }}
{{- end }}
{{- end }}
