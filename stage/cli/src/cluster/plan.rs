//! `kubectl splitmodel plan`: how a model would be cut over the nodes of a cluster.
use std::io::Read as _;
use std::path::Path;

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use splitmodel_api::{ModelSource, SplitModel};
use splitmodel_gguf::ModelFacts;
use splitmodel_planner::UnusedDevice;
use splitmodel_topology::{Machines, Wanted, names, place};

use super::ClusterError;
use super::connect::Connection;
use crate::args::{ClusterPlanArgs, Target};
use crate::error::CliError;
use crate::planning::{self, Planned};
use crate::{manifest, ui};

/// Most bytes of a model's facts in their short form.
const MAX_FACTS: u64 = 64 << 10;
/// How the short form begins.
const FACTS: &[u8] = b"splitmodel-facts-";

/// Prints the plan that the operator would make of the manifest.
///
/// # Errors
/// [`CliError`]: the manifest's field, what is not known of the model, or what is missing with each node's reason.
pub async fn run(target: &Target, args: ClusterPlanArgs) -> Result<(), CliError> {
    let model = manifest::read(&args.file)?;
    let mut wanted = manifest::wanted(&model, &args.file)?;
    if let Some(stages) = args.stages {
        manifest::override_stages(&mut wanted, stages)?;
    }
    let mut connection = Connection::open(target).await?;
    if let (None, Some(namespace)) = (&target.namespace, model.namespace()) {
        connection = connection.within(&namespace);
    }
    let facts = facts(&args, &model, &connection).await?;
    let nodes: Api<Node> = Api::all(connection.client.clone());
    let nodes = connection.ask("list nodes", nodes.list(&ListParams::default())).await?;
    // Without them, or the right to see them, labels and what is declared say how large GPUs are.
    let slices: Api<ResourceSlice> = Api::all(connection.client.clone());
    let slices = connection.ask("list resourceslices", slices.list(&ListParams::default())).await;
    let planned = plan(wanted, facts, nodes.items, &slices.map(|s| s.items).unwrap_or_default())?;
    planned.print(args.json)?;
    if let Some(warning) = file_warning(&model) {
        ui::note(&warning);
    }
    Ok(())
}

fn plan(
    wanted: Wanted,
    facts: ModelFacts,
    mut nodes: Vec<Node>,
    slices: &[ResourceSlice],
) -> Result<Planned, CliError> {
    // The operator's order, so that the plan is the operator's.
    nodes.sort_by_key(ResourceExt::name_any);
    let machines = Machines { nodes: nodes.iter().collect(), slices: slices.iter().collect() };
    let placed = place(&wanted, &facts, Some(&machines)).map_err(|e| CliError::Plan(e.to_string()))?;
    let mut plan = placed.plan;
    let excluded = placed.places.excluded.into_iter();
    plan.unused.extend(excluded.map(|(device, why)| UnusedDevice { device, reason: format!("it {why}") }));
    Ok(Planned { wanted, facts, plan })
}

fn file_warning(model: &SplitModel) -> Option<String> {
    let file = matches!(model.source(), Ok(ModelSource::File { .. }));
    file.then(|| {
        "note: a file:// source is of one machine; for the cluster put it on a claim and write pvc://claim/path"
            .to_owned()
    })
}

/// What is known of the model: of the file that the flag names, of the source if it is a file here, or of the cluster.
async fn facts(args: &ClusterPlanArgs, model: &SplitModel, connection: &Connection) -> Result<ModelFacts, CliError> {
    let (path, source) = match &args.facts {
        Some(path) => (Some(path.clone()), path.display().to_string()),
        None => (manifest::local_source(model, &args.file)?, model.spec.model.source.clone()),
    };
    let Some(path) = path else { return Ok(facts_of_cluster(model, connection).await?) };
    let read = tokio::task::spawn_blocking(move || facts_of_file(&path, &source));
    read.await.map_err(|e| CliError::Plan(format!("reading the model was cut short: {e}")))?
}

/// From a GGUF file, or from what the inspect pod writes.
fn facts_of_file(path: &Path, source: &str) -> Result<ModelFacts, CliError> {
    let mut head = Vec::new();
    let file = std::fs::File::open(path).map_err(CliError::file("read", path))?;
    file.take(MAX_FACTS).read_to_end(&mut head).map_err(CliError::file("read", path))?;
    if head.starts_with(FACTS) {
        let text = String::from_utf8_lossy(&head);
        return ModelFacts::from_compact(&text)
            .map_err(|e| CliError::Model { model: source.to_owned(), message: e.to_string() });
    }
    planning::facts(&planning::open_model(path, source)?, source)
}

/// What the operator read of the SplitModel of the same name and source.
async fn facts_of_cluster(model: &SplitModel, connection: &Connection) -> Result<ModelFacts, ClusterError> {
    let (name, namespace) = (model.name_any(), connection.namespace.clone());
    let unknown = |why: String| ClusterError::NoFacts { source_text: model.spec.model.source.clone(), why };
    let Some(applied) = connection.find(&name).await? else {
        return Err(unknown(format!(
            "it cannot be read from here, and namespace {namespace} has no SplitModel {name}"
        )));
    };
    if applied.spec.model != model.spec.model {
        return Err(unknown(format!("SplitModel {name} in namespace {namespace} has another source")));
    }
    let maps: Api<ConfigMap> = Api::namespaced(connection.client.clone(), &namespace);
    let right = format!("get configmaps in namespace {namespace}");
    let map = connection.ask(&right, maps.get_opt(&names::facts(&name))).await?;
    let data = map.and_then(|m| m.data).unwrap_or_default();
    let current = data.get(names::FACTS_KEY) == Some(&names::inspect_key(&applied));
    match data.get(names::FACTS).filter(|_| current) {
        Some(facts) => {
            ModelFacts::from_compact(facts).map_err(|e| unknown(format!("what the operator read is damaged: {e}")))
        }
        None => Err(unknown(format!("the operator has not read it yet; `kubectl splitmodel status {name}` says why"))),
    }
}
