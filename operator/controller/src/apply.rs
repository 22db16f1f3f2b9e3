//! Writes to the API server.

use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::DynamicObject;
use kube::{Client, ResourceExt as _};

use crate::children::{Child, Kind, Owner};
use crate::metrics::Metrics;
use crate::names;
use crate::observed::Observed;
use crate::reason::{NotReady, Reason};

/// Owner of the fields that the operator applies.
pub const FIELD_MANAGER: &str = "splitmodel-operator";

/// Why something was not written.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Somebody has to do something.
    #[error("{}", .0.message)]
    NotReady(NotReady),
    /// The API server does not answer as it should; it is tried again.
    #[error(transparent)]
    Kube(#[from] kube::Error),
}

/// Writes the children of one SplitModel.
#[derive(Clone, Copy)]
pub struct Applier<'a> {
    /// The API.
    pub client: &'a Client,
    /// Whose children.
    pub owner: &'a Owner,
    /// Counts writes.
    pub metrics: &'a Metrics,
}

impl Applier<'_> {
    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.owner.namespace, &kind.resource())
    }

    /// Makes `child` as it should be, and says whether that took a write.
    ///
    /// # Errors
    /// [`ApplyError`].
    pub async fn ensure(&self, child: &Child, observed: &Observed) -> Result<bool, ApplyError> {
        match observed.child(self.owner, child.kind, &child.name) {
            Some(live) if live.metadata.deletion_timestamp.is_some() => return Ok(false),
            Some(live) if child.is_current(live) => return Ok(false),
            Some(_) => {}
            None => {
                if !self.is_free(child).await? {
                    return Ok(false);
                }
            }
        }
        self.patch(child).await?;
        Ok(true)
    }

    /// Whether the name of a child that was not seen yet may be used. Applying over an object of somebody else would take
    /// it over.
    async fn is_free(&self, child: &Child) -> Result<bool, ApplyError> {
        let Some(live) = self.api(child.kind).get_opt(&child.name).await? else { return Ok(true) };
        if live.owner_references().iter().any(|r| r.uid == self.owner.uid) {
            // The watch has not shown it yet.
            return Ok(live.metadata.deletion_timestamp.is_none() && !child.is_current(&live));
        }
        let kind = child.kind.resource().kind;
        let ours = live.labels().get(names::MODEL) == Some(&self.owner.name);
        Err(ApplyError::NotReady(if ours {
            let message = format!("{kind} {} of a former {} is still being deleted", child.name, self.owner.name);
            NotReady::new(Reason::OldChildren, message)
        } else {
            let message = format!(
                "{kind} {} is there already and belongs to somebody else; delete it, or give the SplitModel another name",
                child.name
            );
            NotReady::new(Reason::NameTaken, message)
        }))
    }

    async fn patch(&self, child: &Child) -> Result<(), ApplyError> {
        self.metrics.write(child.kind.resource().kind.as_str());
        let params = PatchParams::apply(FIELD_MANAGER).force().validation_strict();
        let patched = self.api(child.kind).patch(&child.name, &params, &Patch::Apply(child.manifest())).await;
        match patched {
            Ok(_) => {
                tracing::info!(kind = %child.kind.resource().kind, name = %child.name, namespace = %self.owner.namespace, "applied");
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 403 | 409 | 422) => {
                let kind = child.kind.resource().kind;
                let message = format!("{kind} {} is refused: {}", child.name, status.message);
                Err(ApplyError::NotReady(NotReady::new(Reason::Refused, message)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes `live`, and what hangs on it.
    ///
    /// # Errors
    /// [`ApplyError`].
    pub async fn delete(&self, kind: Kind, live: &DynamicObject) -> Result<(), ApplyError> {
        if live.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let preconditions = Preconditions { uid: live.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams::background().preconditions(preconditions);
        self.deleted(kind, &live.name_any(), &params).await
    }

    /// Removes a pod that does not go away by itself from the API server's books.
    ///
    /// # Errors
    /// [`ApplyError`].
    pub async fn force_delete_pod(&self, name: &str, uid: Option<String>) -> Result<(), ApplyError> {
        let preconditions = Preconditions { uid, resource_version: None };
        let params =
            DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }.preconditions(preconditions);
        self.deleted(Kind::Pod, name, &params).await
    }

    async fn deleted(&self, kind: Kind, name: &str, params: &DeleteParams) -> Result<(), ApplyError> {
        self.metrics.write(kind.resource().kind.as_str());
        match self.api(kind).delete(name, params).await {
            Ok(_) => {
                tracing::info!(kind = %kind.resource().kind, name, namespace = %self.owner.namespace, "deleted");
                Ok(())
            }
            // Gone already, or another of the same name by now.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
