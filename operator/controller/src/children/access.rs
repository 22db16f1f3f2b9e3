//! How clients reach a SplitModel, and who may reach its stages.

use serde_json::json;
use splitmodel_api::{ServiceType, SessionAffinity};

use super::{Child, Kind, Owner};
use crate::names::{self, API_PORT, CONTROL_PORT, HEALTH_PORT, LINK_PORT, METRICS_PORT};
use splitmodel_api::ApiSpec;

/// The Service that clients use: ready pods of stage 0.
#[must_use]
pub fn api_service(owner: &Owner, api: &ApiSpec) -> Child {
    let service_type = match api.service_type {
        ServiceType::ClusterIP => "ClusterIP",
        ServiceType::NodePort => "NodePort",
        ServiceType::LoadBalancer => "LoadBalancer",
    };
    let affinity = match api.session_affinity {
        SessionAffinity::None => "None",
        SessionAffinity::ClientIP => "ClientIP",
    };
    let content = json!({"spec": {
        "type": service_type,
        "sessionAffinity": affinity,
        "selector": {names::MODEL: owner.name, names::STAGE: "0"},
        "ports": [{"name": "http", "port": api.port, "targetPort": API_PORT, "protocol": "TCP", "appProtocol": "http"}],
    }});
    Child::new(Kind::Service, owner, owner.name.clone(), names::labels(&owner.name), content)
}

/// Links between the stages of this model only; the API, metrics, health and the control service, which asks for a
/// certificate, for all.
#[must_use]
pub fn network_policy(owner: &Owner) -> Child {
    let stages = json!({"matchLabels": {names::MODEL: owner.name}, "matchExpressions": [
        {"key": names::STAGE, "operator": "Exists"},
    ]});
    let port = |port: u16| json!({"port": port, "protocol": "TCP"});
    let content = json!({"spec": {
        "podSelector": stages,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": stages}], "ports": [port(LINK_PORT)]},
            {"ports": [port(API_PORT), port(CONTROL_PORT), port(HEALTH_PORT), port(METRICS_PORT)]},
        ],
    }});
    Child::new(Kind::NetworkPolicy, owner, owner.name.clone(), names::labels(&owner.name), content)
}
