//! What can go wrong with a cluster, in words for the user.
use std::path::PathBuf;

use kube::config::KubeconfigError;

/// Why the cluster was no help. Every message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No kubeconfig, and this is no pod.
    #[error("{}: there is no kubeconfig; name one with --kubeconfig or in KUBECONFIG", path.display())]
    NoKubeconfig {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The kubeconfig is wrong.
    #[error("the kubeconfig cannot be used: {0}")]
    Kubeconfig(String),
    /// The kubeconfig does not have the context.
    #[error("--context: the kubeconfig has no context `{name}`; it has {}", listed(known))]
    NoContext {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The kubeconfig has no current context.
    #[error("the kubeconfig names no current context; choose one with --context: {}", listed(known))]
    NoCurrentContext {
        /// What there is.
        known: Vec<String>,
    },
    /// The API server does not answer.
    #[error(
        "the API server at {url} cannot be reached: {message}; does the cluster run, and is it the right --context?"
    )]
    Unreachable {
        /// Its address.
        url: String,
        /// Why not.
        message: String,
    },
    /// The API server does not know the user.
    #[error("the API server at {url} does not know you ({message}); log in again, or choose another --context")]
    Unauthorized {
        /// Its address.
        url: String,
        /// Its words.
        message: String,
    },
    /// The user lacks a right.
    #[error("the cluster does not allow it: {message}; ask for the right to {right}")]
    Forbidden {
        /// The API server's words.
        message: String,
        /// What is wanted.
        right: String,
    },
    /// The definition of the resource is not installed.
    #[error(
        "the cluster knows no SplitModels: the definition splitmodels.splitmodel.dev is not installed (helm install \
         splitmodel-crds), or this is another --context"
    )]
    NoDefinition,
    /// No SplitModel of that name.
    #[error("namespace {namespace} has no SplitModel `{name}`; {}", others(known))]
    NoSuchModel {
        /// What was asked for.
        name: String,
        /// Where.
        namespace: String,
        /// What there is.
        known: Vec<String>,
    },
    /// It serves nothing now.
    #[error("SplitModel {name} does not serve: {why}; `kubectl splitmodel status {name}` shows more")]
    NotServing {
        /// The SplitModel.
        name: String,
        /// Its own words.
        why: String,
    },
    /// What is in the model is not known.
    #[error(
        "spec.model.source {source_text}: {why}; name the file with --facts, or apply the manifest (with replicas: 0 \
             no stage starts) and the operator reads it"
    )]
    NoFacts {
        /// The source, as written.
        source_text: String,
        /// Why it is not known.
        why: String,
    },
    /// A connection into a pod failed.
    #[error("the connection to port {port} of pod {pod} failed: {message}")]
    Forward {
        /// The pod.
        pod: String,
        /// Its port.
        port: u16,
        /// Why.
        message: String,
    },
    /// Something else that the API server says.
    #[error("the API server at {url} answers: {message}")]
    Api {
        /// Its address.
        url: String,
        /// Its words.
        message: String,
    },
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn others(names: &[String]) -> String {
    if names.is_empty() {
        return "there are none; --namespace names another one".to_owned();
    }
    format!("there are {}; --namespace names another one", names.join(", "))
}

impl ClusterError {
    /// What became of a call to the API server at `url` that needs the `right`, such as `list nodes`.
    #[must_use]
    pub fn of(error: &kube::Error, url: &str, right: &str) -> Self {
        let url = url.to_owned();
        match error {
            kube::Error::Api(status) => {
                let message = if status.message.is_empty() { status.reason.clone() } else { status.message.clone() };
                match status.code {
                    401 => Self::Unauthorized { url, message },
                    403 => Self::Forbidden { message, right: right.to_owned() },
                    // A path that nobody serves; an object that is not there has a reason of its own.
                    404 if status.reason != "NotFound" => Self::NoDefinition,
                    _ => Self::Api { url, message },
                }
            }
            kube::Error::SerdeError(error) => Self::Api {
                url,
                message: format!("what this program cannot read ({error}); is it as new as the operator?"),
            },
            kube::Error::Auth(error) => Self::Unauthorized { url, message: root(error) },
            kube::Error::Service(error) => Self::Unreachable { url, message: root(error.as_ref()) },
            error => Self::Unreachable { url, message: root(error) },
        }
    }

    /// What is wrong with a kubeconfig, which has the contexts `known`.
    #[must_use]
    pub fn kubeconfig(error: &KubeconfigError, known: Vec<String>) -> Self {
        match error {
            KubeconfigError::ReadConfig(io, path) if io.kind() == std::io::ErrorKind::NotFound => {
                Self::NoKubeconfig { path: path.clone() }
            }
            KubeconfigError::FindPath => Self::NoKubeconfig { path: "~/.kube/config".into() },
            KubeconfigError::CurrentContextNotSet => Self::NoCurrentContext { known },
            KubeconfigError::LoadContext(name) => Self::NoContext { name: name.clone(), known },
            error => Self::Kubeconfig(error.to_string()),
        }
    }
}

/// The first cause of an error.
pub(super) fn root(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    fn said(code: u16, reason: &str) -> String {
        let status = Status::failure("its words", reason).with_code(code).boxed();
        ClusterError::of(&kube::Error::Api(status), "https://c", "list nodes").to_string()
    }

    #[test]
    fn answers_of_the_server_say_what_to_do() {
        assert!(said(401, "Unauthorized").contains("log in again"));
        assert_eq!(said(403, "Forbidden"), "the cluster does not allow it: its words; ask for the right to list nodes");
        assert!(said(404, "Failed to parse error data").contains("helm install splitmodel-crds"));
        assert_eq!(said(404, "NotFound"), "the API server at https://c answers: its words");
        assert_eq!(said(500, ""), "the API server at https://c answers: its words");
    }

    #[test]
    fn kubeconfigs_are_named() {
        let missing = KubeconfigError::ReadConfig(std::io::ErrorKind::NotFound.into(), "/k".into());
        assert!(ClusterError::kubeconfig(&missing, vec![]).to_string().starts_with("/k: there is no kubeconfig"));
        let context = KubeconfigError::LoadContext("x".into());
        let known = vec!["a".to_owned(), "b".to_owned()];
        assert!(ClusterError::kubeconfig(&context, known).to_string().ends_with("no context `x`; it has a, b"));
    }
}
