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
{{- with .Values.image.digest -}}
{{ $.Values.image.repository }}@{{ . }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* ConfigMap with the issuers of the control service; operators of two classes may serve one namespace. */}}
{{- define "cadre.controlCa" -}}
cadre-control-ca{{ with .Values.class }}-{{ . }}{{ end }}
{{- end -}}

{{/* Policy that lets only the operator make servers; it also says which class is looked after in all namespaces. */}}
{{- define "cadre.policy" -}}
cadre-servers{{ with .Values.class }}-{{ . }}{{ end }}
{{- end -}}

{{/* Priority class of servers without a template. */}}
{{- define "cadre.priorityClass" -}}
{{- if .Values.settings.serverPriorityClass -}}
{{ .Values.settings.serverPriorityClass }}
{{- else if .Values.priorityClass.enabled -}}
{{ .Values.priorityClass.name | default (printf "%s-harvest" .Release.Name) }}
{{- end -}}
{{- end -}}

{{/* Where the chart's own pods may run. */}}
{{- define "cadre.nodes" -}}
{{- with .Values.operator.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
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
