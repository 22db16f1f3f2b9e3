//! Names, labels and annotations of what belongs to a SplitModel.

use std::collections::BTreeMap;

use splitmodel_api::{GROUP, SplitModel};

/// Value of `app.kubernetes.io/managed-by`.
pub const MANAGER: &str = "splitmodel-operator";
/// Label: name of the SplitModel.
pub const MODEL: &str = "splitmodel.dev/model";
/// Label: number of the chain.
pub const CHAIN: &str = "splitmodel.dev/chain";
/// Label: number of the stage.
pub const STAGE: &str = "splitmodel.dev/stage";
/// Label on pods and StatefulSets: the revision that they follow.
pub const REVISION: &str = "splitmodel.dev/revision";
/// Annotation on children: hash of what was applied.
pub const HASH: &str = "splitmodel.dev/hash";
/// Annotation on a SplitModel: any new value tries again what was given up, and reads the model's header anew.
pub const RETRY: &str = "splitmodel.dev/retry";
/// Annotation on a stage that was given up: the value of [`RETRY`] at that time.
pub const GIVEN_UP: &str = "splitmodel.dev/given-up";

/// Key in the ConfigMap of [`facts`]: what the header says.
pub const FACTS: &str = "facts";
/// Key in it: the [`inspect_key`] of what was read.
pub const FACTS_KEY: &str = "key";

/// Port of the API in pods of stage 0.
pub const API_PORT: u16 = 8000;
/// Port of the link.
pub const LINK_PORT: u16 = 7101;
/// Port of the control service.
pub const CONTROL_PORT: u16 = 7102;
/// Port of the health service.
pub const HEALTH_PORT: u16 = 7103;
/// Port of the metrics.
pub const METRICS_PORT: u16 = 7104;

/// Name of a chain: `<model>-<chain>`.
#[must_use]
pub fn chain(model: &str, chain: u32) -> String {
    format!("{model}-{chain}")
}

/// Name of a stage's StatefulSet and Service: `<model>-<chain>-<stage>`.
#[must_use]
pub fn stage(model: &str, chain: u32, stage: usize) -> String {
    format!("{model}-{chain}-{stage}")
}

/// Name of a stage's pod.
#[must_use]
pub fn pod(model: &str, chain: u32, stage: usize) -> String {
    format!("{model}-{chain}-{stage}-0")
}

/// Name of a stage's certificate Secret.
#[must_use]
pub fn tls(model: &str, chain: u32, stage: usize) -> String {
    format!("{model}-{chain}-{stage}-tls")
}

/// Name of a stage's cache claim.
#[must_use]
pub fn cache(model: &str, chain: u32, stage: usize) -> String {
    format!("{model}-{chain}-{stage}-cache")
}

/// Name of the Secret with the authority.
#[must_use]
pub fn ca(model: &str) -> String {
    format!("{model}-ca")
}

/// Name of the pod that reads the model's header.
#[must_use]
pub fn inspect(model: &str) -> String {
    format!("{model}-inspect")
}

/// Name of the ConfigMap with what the header says.
#[must_use]
pub fn facts(model: &str) -> String {
    format!("{model}-facts")
}

/// What the user last wrote to have things tried again.
#[must_use]
pub fn retry(model: &SplitModel) -> Option<String> {
    model.metadata.annotations.as_ref()?.get(RETRY).cloned()
}

/// Names the header that is read: source, credentials, authority, and the wish to read it again.
#[must_use]
pub fn inspect_key(model: &SplitModel) -> String {
    let again = retry(model).unwrap_or_default();
    let spec = &model.spec.model;
    let (secret, authority) = (&spec.credentials_secret, &spec.ca_config_map);
    short_hash(format!("{}\n{secret:?}\n{authority:?}\n{again}", spec.source).as_bytes())
}

/// DNS name of a stage, also in its certificate.
#[must_use]
pub fn dns(model: &str, namespace: &str, chain: u32, stage: usize) -> String {
    format!("{model}-{chain}-{stage}.{namespace}.svc")
}

/// Labels of all children of a SplitModel.
#[must_use]
pub fn labels(model: &str) -> BTreeMap<String, String> {
    [
        ("app.kubernetes.io/name", "splitmodel"),
        ("app.kubernetes.io/instance", model),
        ("app.kubernetes.io/managed-by", MANAGER),
        (MODEL, model),
    ]
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .into()
}

/// Labels of what belongs to a chain.
#[must_use]
pub fn chain_labels(model: &str, chain: u32) -> BTreeMap<String, String> {
    let mut labels = labels(model);
    labels.insert(CHAIN.to_owned(), chain.to_string());
    labels
}

/// Labels of what belongs to a stage.
#[must_use]
pub fn stage_labels(model: &str, chain: u32, stage: usize) -> BTreeMap<String, String> {
    let mut labels = chain_labels(model, chain);
    labels.insert(STAGE.to_owned(), stage.to_string());
    labels
}

/// Selector of everything that operators of this kind made, for lists and watches.
#[must_use]
pub fn selector() -> String {
    format!("app.kubernetes.io/managed-by={MANAGER},{GROUP}/model")
}

/// Ten hexadecimal digits of a hash.
#[must_use]
pub fn short_hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..10].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use splitmodel_api::{MAX_NAME, MAX_STAGES};

    #[test]
    fn the_longest_names_fit() {
        let model = "m".repeat(MAX_NAME);
        // A StatefulSet's pods carry its name, '-' and ten characters in a label of at most 63.
        assert!(stage(&model, 99, MAX_STAGES - 1).len() + 11 <= 63);
        for name in [pod(&model, 99, 63), tls(&model, 99, 63), cache(&model, 99, 63), facts(&model), inspect(&model)] {
            assert!(name.len() <= 63, "{name}");
        }
        let dns = dns(&model, &"n".repeat(63), 99, 63);
        assert!(dns.split('.').all(|part| part.len() <= 63), "{dns}");
    }
}
