//! `kubectl splitmodel chat`: the usual conversation, through a port of this machine that leads to a ready pod.
use std::sync::Arc;

use splitmodel_api::SplitModel;
use splitmodel_topology::names;

use super::ClusterError;
use super::connect::Connection;
use super::forward::{self, Forward};
use crate::args::{ClusterChatArgs, Target};
use crate::error::CliError;
use crate::{chat, ui};

/// Talks until the input ends. A pod that is replaced costs the answer that it was giving; the next turn goes to its successor.
///
/// # Errors
/// [`ClusterError`] when nothing serves or a right is missing, else as [`chat::talk`].
pub async fn run(target: &Target, args: ClusterChatArgs) -> Result<(), CliError> {
    let connection = Connection::open(target).await?;
    let model = connection.get(&args.name).await?;
    let Some(pod) = forward::ready_pods(&connection, &args.name).await?.into_iter().next() else {
        return Err(ClusterError::NotServing { name: args.name, why: why_not(&model) }.into());
    };
    if let (Some(secret), None) = (&model.spec.api.key_secret, &args.chat.api_key) {
        let message = format!("is missing: clients must present a key of Secret {secret} (or in SPLITMODEL_API_KEY)");
        return Err(CliError::Flag { flag: "api-key", message });
    }
    forward::check(&connection, &pod, names::API_PORT).await?;
    let find = forward::to_ready_pod(&connection, &args.name, ui::note);
    let say = Arc::new(|error: &ClusterError| ui::note(&format!("error: {error}")));
    let forward = Forward::open(&connection, names::API_PORT, find, say).await?;
    chat::talk(&format!("http://{}", forward.address), args.chat).await
}

/// What the SplitModel says of itself.
fn why_not(model: &SplitModel) -> String {
    let status = model.status.as_ref();
    let ready = status.and_then(|s| s.conditions.iter().find(|c| c.type_ == "Ready"));
    match ready {
        Some(condition) if condition.status != "True" => ui::plain(&condition.message),
        Some(_) => "no pod of its stage 0 is ready".to_owned(),
        None => "the operator has not looked at it yet".to_owned(),
    }
}
