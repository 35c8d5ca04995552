//! What every worker's pod gets beside what its template says.
//!
//! In: a pod's spec from a template, the container's name, variables. Out: the same spec with our
//! variables, the token for the control service, memory for `/dev/shm`, and the settings of Pod
//! Security's level *restricted* wherever the template is silent. What the template says stays.

use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapProjection, Container, EmptyDirVolumeSource, EnvVar, EnvVarSource,
    KeyToPath, ObjectFieldSelector, PodSecurityContext, PodSpec, ProjectedVolumeSource,
    SeccompProfile, SecurityContext, ServiceAccountTokenProjection, Volume, VolumeMount,
    VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use cadre_crds::contract::{
    CADRE_CONTROL, CADRE_CONTROL_CA, CADRE_CONTROL_TOKEN, CADRE_HOST, CADRE_OUT,
};

use crate::settings::Settings;

/// Where the token and the certificate lie.
const CONTROL_FOLDER: &str = "/var/run/cadre";
/// Where a worker writes what it leaves behind.
const OUT_FOLDER: &str = "/var/lib/cadre";
/// How long a token for the control service is good.
const TOKEN_SECONDS: i64 = 3600;

/// A variable with a value.
pub(crate) fn variable(name: &str, value: impl Into<String>) -> EnvVar {
    EnvVar { name: name.into(), value: Some(value.into()), value_from: None }
}

/// A variable whose value is a field of the pod.
pub(crate) fn from_field(name: &str, path: &str) -> EnvVar {
    let field = ObjectFieldSelector { api_version: None, field_path: path.into() };
    let source = EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() };
    EnvVar { name: name.into(), value: None, value_from: Some(source) }
}

/// Completes the spec of a worker's pod; `container` names the one that is ours.
pub(crate) fn complete(
    spec: &mut PodSpec,
    container: &str,
    variables: Vec<EnvVar>,
    settings: &Settings,
) {
    spec.restart_policy = Some("Never".into());
    spec.enable_service_links.get_or_insert(false);
    spec.automount_service_account_token.get_or_insert(false);
    let security = spec.security_context.get_or_insert_with(PodSecurityContext::default);
    security.seccomp_profile.get_or_insert_with(runtime_default);
    volume(spec, control_volume(settings));
    volume(spec, empty("cadre-out", EmptyDirVolumeSource::default()));
    volume(
        spec,
        empty(
            "cadre-shm",
            EmptyDirVolumeSource {
                medium: Some("Memory".into()),
                size_limit: Some(Quantity(settings.shared_memory.clone())),
            },
        ),
    );
    let Some(container) = spec.containers.iter_mut().find(|it| it.name == container) else {
        return;
    };
    mount(container, "cadre-control", CONTROL_FOLDER, true);
    mount(container, "cadre-out", OUT_FOLDER, false);
    mount(container, "cadre-shm", "/dev/shm", false);
    // The log's last lines are the reason when it gives none.
    container.termination_message_policy.get_or_insert("FallbackToLogsOnError".into());
    restrict(container);
    // Ours first: variables of the template may refer to them.
    let mut env = vec![
        variable(CADRE_CONTROL, settings.control.as_str()),
        variable(CADRE_CONTROL_CA, format!("{CONTROL_FOLDER}/ca.crt")),
        variable(CADRE_CONTROL_TOKEN, format!("{CONTROL_FOLDER}/token")),
        variable(CADRE_OUT, OUT_FOLDER),
        from_field(CADRE_HOST, "status.podIP"),
    ];
    env.extend(variables);
    env.extend(container.env.take().into_iter().flatten());
    container.env = Some(env);
}

fn restrict(container: &mut Container) {
    let security = container.security_context.get_or_insert_with(SecurityContext::default);
    security.allow_privilege_escalation.get_or_insert(false);
    security.capabilities.get_or_insert_with(|| Capabilities {
        drop: Some(vec!["ALL".into()]),
        ..Capabilities::default()
    });
}

/// Adds a volume unless the template has one of this name.
pub(crate) fn volume(spec: &mut PodSpec, volume: Volume) {
    let volumes = spec.volumes.get_or_insert_with(Vec::new);
    if !volumes.iter().any(|it| it.name == volume.name) {
        volumes.push(volume);
    }
}

/// Mounts a volume unless the template mounts something there.
pub(crate) fn mount(container: &mut Container, volume: &str, path: &str, read_only: bool) {
    let mounts = container.volume_mounts.get_or_insert_with(Vec::new);
    if !mounts.iter().any(|it| it.mount_path == path) {
        mounts.push(VolumeMount {
            name: volume.into(),
            mount_path: path.into(),
            read_only: read_only.then_some(true),
            ..VolumeMount::default()
        });
    }
}

/// An empty directory.
pub(crate) fn empty(name: &str, source: EmptyDirVolumeSource) -> Volume {
    Volume { name: name.into(), empty_dir: Some(source), ..Volume::default() }
}

fn runtime_default() -> SeccompProfile {
    SeccompProfile { type_: "RuntimeDefault".into(), localhost_profile: None }
}

/// The token, and the certificate of the issuer if the namespace has it.
fn control_volume(settings: &Settings) -> Volume {
    let token = ServiceAccountTokenProjection {
        audience: Some(settings.audience.clone()),
        expiration_seconds: Some(TOKEN_SECONDS),
        path: "token".into(),
    };
    let certificate = ConfigMapProjection {
        name: settings.control_ca.clone(),
        items: Some(vec![KeyToPath { key: "ca.crt".into(), path: "ca.crt".into(), mode: None }]),
        optional: Some(true),
    };
    let sources = vec![
        VolumeProjection { service_account_token: Some(token), ..VolumeProjection::default() },
        VolumeProjection { config_map: Some(certificate), ..VolumeProjection::default() },
    ];
    Volume {
        name: "cadre-control".into(),
        projected: Some(ProjectedVolumeSource { sources: Some(sources), default_mode: None }),
        ..Volume::default()
    }
}
