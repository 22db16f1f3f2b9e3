{{- define "splitmodel.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of everything the chart makes. */}}
{{- define "splitmodel.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 57 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "splitmodel.name" . -}}
{{- $base := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- printf "%s-operator" ($base | trunc 48 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "splitmodel.selector" -}}
app.kubernetes.io/name: splitmodel-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "splitmodel.labels" -}}
{{ include "splitmodel.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: splitmodel
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "splitmodel.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "splitmodel.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* An image: dict "image" .Values.image "version" .Chart.AppVersion */}}
{{- define "splitmodel.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .version .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What the operator may do in a namespace that it watches. */}}
{{- define "splitmodel.namespaceRules" -}}
- apiGroups: [splitmodel.dev]
  resources: [splitmodels]
  verbs: [get, list, watch, patch]
- apiGroups: [splitmodel.dev]
  resources: [splitmodels/status]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, persistentvolumeclaims, pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# By name only: certificates that the operator makes. It can neither list nor watch Secrets.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Why a pod is not made, such as a quota, stands in events only.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end -}}

{{/* What it may read of the cluster, to plan by the memory of devices. */}}
{{- define "splitmodel.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
- apiGroups: [resource.k8s.io]
  resources: [resourceslices]
  verbs: [list, watch]
{{- end -}}
