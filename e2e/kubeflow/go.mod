// The version of Kubeflow Trainer whose definitions scripts/kubeflow fetches.
module cadre.dev/e2e/kubeflow

go 1.26.0

require github.com/kubeflow/trainer/v2 v2.0.0
