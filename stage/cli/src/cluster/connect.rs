//! From the flags to a client of a cluster.
use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use hyper_util::client::proxy::matcher::Matcher;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use splitmodel_api::SplitModel;

use super::ClusterError;
use crate::args::Target;

/// Time that the API server has for an answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A cluster and a namespace of it.
#[derive(Clone)]
pub struct Connection {
    /// Its client.
    pub client: Client,
    /// The namespace that is meant, where no flag names it: that of the context.
    pub namespace: String,
    /// Address of the API server.
    pub url: String,
}

impl Connection {
    /// The cluster that `target` means; nothing is asked of it yet.
    ///
    /// # Errors
    /// [`ClusterError`] of the kubeconfig.
    pub async fn open(target: &Target) -> Result<Self, ClusterError> {
        // A second call finds it installed: fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = config(target).await?;
        if let Some(namespace) = &target.namespace {
            config.default_namespace.clone_from(namespace);
        }
        let url = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let namespace = config.default_namespace.clone();
        let client = Client::try_from(config).map_err(|e| ClusterError::Kubeconfig(super::error::root(&e)))?;
        Ok(Self { client, namespace, url })
    }

    /// The answer of a call that needs the `right`, such as `list nodes`.
    ///
    /// # Errors
    /// [`ClusterError`], also when it takes too long.
    pub async fn ask<T>(
        &self,
        right: &str,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ClusterError> {
        match tokio::time::timeout(TIMEOUT, call).await {
            Ok(answer) => answer.map_err(|e| ClusterError::of(&e, &self.url, right)),
            Err(_) => {
                let message = format!("it took more than {} s to answer", TIMEOUT.as_secs());
                Err(ClusterError::Unreachable { url: self.url.clone(), message })
            }
        }
    }

    /// One SplitModel of the namespace, if it is there.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn find(&self, name: &str) -> Result<Option<SplitModel>, ClusterError> {
        let api: Api<SplitModel> = Api::namespaced(self.client.clone(), &self.namespace);
        let absent =
            |error: &kube::Error| matches!(error, kube::Error::Api(s) if s.code == 404 && s.reason == "NotFound");
        let call = async {
            match api.get(name).await {
                Err(error) if absent(&error) => Ok(None),
                answer => answer.map(Some),
            }
        };
        self.ask(&format!("get splitmodels in namespace {}", self.namespace), call).await
    }

    /// One SplitModel of the namespace.
    ///
    /// # Errors
    /// [`ClusterError::NoSuchModel`] with those that are there, and others.
    pub async fn get(&self, name: &str) -> Result<SplitModel, ClusterError> {
        if let Some(model) = self.find(name).await? {
            return Ok(model);
        }
        // Who may not list them is told the name alone.
        let known = self.list(false).await.unwrap_or_default();
        let known = known.iter().map(ResourceExt::name_any).collect();
        Err(ClusterError::NoSuchModel { name: name.to_owned(), namespace: self.namespace.clone(), known })
    }

    /// All SplitModels of the namespace, or of `all`.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn list(&self, all: bool) -> Result<Vec<SplitModel>, ClusterError> {
        let (api, right): (Api<SplitModel>, _) = if all {
            (Api::all(self.client.clone()), "list splitmodels in all namespaces".to_owned())
        } else {
            let right = format!("list splitmodels in namespace {}", self.namespace);
            (Api::namespaced(self.client.clone(), &self.namespace), right)
        };
        Ok(self.ask(&right, api.list(&ListParams::default())).await?.items)
    }

    /// The same cluster, another namespace.
    #[must_use]
    pub fn within(&self, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..self.clone() }
    }
}

/// The kubeconfig's context; in a pod without one, the pod's own account.
async fn config(target: &Target) -> Result<Config, ClusterError> {
    let read = match &target.kubeconfig {
        Some(path) => Kubeconfig::read_from(path),
        None => Kubeconfig::read(),
    };
    let kubeconfig = match read {
        Ok(kubeconfig) => kubeconfig,
        Err(error) => {
            let error = ClusterError::kubeconfig(&error, Vec::new());
            let implicit = target.kubeconfig.is_none() && target.context.is_none();
            return match error {
                ClusterError::NoKubeconfig { .. } if implicit => Config::incluster().map_err(|_| error),
                error => Err(error),
            };
        }
    };
    let names = || kubeconfig.contexts.iter().map(|c| c.name.clone()).collect::<Vec<_>>();
    let own_proxy = has_own_proxy(&kubeconfig, target.context.as_deref());
    let options = KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
    let mut config = Config::from_custom_kubeconfig(kubeconfig.clone(), &options)
        .await
        .map_err(|e| ClusterError::kubeconfig(&e, names()))?;
    // A proxy of the environment is not for clusters on this machine, nor for those that NO_PROXY names.
    let local = config.cluster_url.host().is_some_and(is_local);
    if !own_proxy && (local || Matcher::from_env().intercept(&config.cluster_url).is_none()) {
        config.proxy_url = None;
    }
    Ok(config)
}

fn is_local(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn has_own_proxy(kubeconfig: &Kubeconfig, context: Option<&str>) -> bool {
    let name = context.or(kubeconfig.current_context.as_deref());
    let context = kubeconfig.contexts.iter().find(|c| Some(c.name.as_str()) == name).and_then(|c| c.context.as_ref());
    let cluster = context.and_then(|context| kubeconfig.clusters.iter().find(|c| c.name == context.cluster));
    cluster.and_then(|c| c.cluster.as_ref()?.proxy_url.as_ref()).is_some_and(|url| !url.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBECONFIG: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts:
- { name: here, context: { cluster: c, user: u, namespace: team } }
- { name: there, context: { cluster: d, user: u } }
clusters:
- { name: c, cluster: { server: 'https://127.0.0.1:1' } }
- { name: d, cluster: { server: 'https://d.example.org', proxy-url: 'http://p:1' } }
users:
- { name: u, user: { token: t } }
";

    #[tokio::test]
    async fn flags_choose_the_context_and_the_namespace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        std::fs::write(&path, KUBECONFIG).unwrap();
        let target = |context: Option<&str>, namespace: Option<&str>| Target {
            kubeconfig: Some(path.clone()),
            context: context.map(str::to_owned),
            namespace: namespace.map(str::to_owned),
        };
        let opened = Connection::open(&target(None, None)).await.unwrap();
        assert_eq!((opened.namespace.as_str(), opened.url.as_str()), ("team", "https://127.0.0.1:1"));
        let opened = Connection::open(&target(Some("there"), Some("n"))).await.unwrap();
        assert_eq!((opened.namespace.as_str(), opened.url.as_str()), ("n", "https://d.example.org"));
        let proxy = config(&target(Some("there"), None)).await.unwrap().proxy_url;
        assert_eq!(proxy.unwrap().host(), Some("p"));
        let Err(error) = Connection::open(&target(Some("nowhere"), None)).await else { panic!("no such context") };
        assert_eq!(error.to_string(), "--context: the kubeconfig has no context `nowhere`; it has here, there");
        let none = Target { kubeconfig: Some(dir.path().join("none")), ..target(None, None) };
        let Err(error) = Connection::open(&none).await else { panic!("no such file") };
        assert!(error.to_string().contains("none: there is no kubeconfig"), "{error}");
        std::fs::write(&path, "contexts: 3").unwrap();
        let Err(error) = Connection::open(&target(None, None)).await else { panic!("no kubeconfig") };
        assert!(error.to_string().starts_with("the kubeconfig cannot be used: "), "{error}");
    }
}
