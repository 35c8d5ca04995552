{{/* Name of everything that the chart makes. */}}
{{- define "cadre.name" -}}
{{- printf "%s-operator" (.Release.Name | trunc 40 | trimSuffix "-") -}}
{{- end -}}

{{- define "cadre.selector" -}}
app.kubernetes.io/name: cadre-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "cadre.labels" -}}
{{ include "cadre.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "cadre.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Secret with the control service's certificate. */}}
{{- define "cadre.controlSecret" -}}
{{- .Values.control.existingSecret | default (printf "%s-control" (include "cadre.name" .)) -}}
{{- end -}}

{{/* What a container of the operator may do. */}}
{{- define "cadre.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "cadre.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Marks what an uninstall makes when everything else is gone, and takes away again; in the order of the weights. */}}
{{- define "cadre.uninstall" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end -}}
