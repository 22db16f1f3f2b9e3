//! `kubectl splitmodel status`.
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;

use kube::ResourceExt as _;
use splitmodel_api::SplitModel;

use super::ClusterError;
use super::connect::Connection;
use super::draw::{Rates, draw};
use super::meter::Meter;
use crate::args::{ClusterStatusArgs, Target};
use crate::error::CliError;
use crate::ui;

/// Between two pictures.
const AGAIN: Duration = Duration::from_secs(2);
/// Puts the cursor back to the top of the terminal and empties it.
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

/// Draws one SplitModel or all of a namespace; with `--watch` again and again, until Ctrl-C.
///
/// # Errors
/// [`ClusterError`], while watching only of the first look; [`CliError::Output`].
pub async fn run(target: &Target, args: ClusterStatusArgs) -> Result<(), CliError> {
    let connection = Connection::open(target).await?;
    let mut meters = BTreeMap::new();
    let mut shown = picture(&connection, &args, &mut meters).await?;
    let clears = args.watch && std::io::stdout().is_terminal();
    ui::text(&if clears { format!("{CLEAR}{shown}") } else { shown.clone() })?;
    if !args.watch {
        return Ok(());
    }
    loop {
        tokio::time::sleep(AGAIN).await;
        let now = match picture(&connection, &args, &mut meters).await {
            Ok(now) => now,
            Err(error) => format!("error: {error}\n"),
        };
        if clears {
            ui::text(&format!("{CLEAR}{now}"))?;
        } else if now != shown {
            ui::text(&format!("\n{now}"))?;
        }
        shown = now;
    }
}

/// Meters by namespace and name.
type Meters = BTreeMap<(String, String), Meter>;

async fn picture(
    connection: &Connection,
    args: &ClusterStatusArgs,
    meters: &mut Meters,
) -> Result<String, ClusterError> {
    let models = match &args.name {
        Some(name) => vec![connection.get(name).await?],
        None => connection.list(args.all_namespaces).await?,
    };
    if models.is_empty() {
        let place =
            if args.all_namespaces { "the cluster".into() } else { format!("namespace {}", connection.namespace) };
        return Ok(format!("{place} has no SplitModels\n"));
    }
    let key = |model: &SplitModel| (model.namespace().unwrap_or_default(), model.name_any());
    meters.retain(|known, _| models.iter().any(|m| key(m) == *known));
    let mut measuring = tokio::task::JoinSet::new();
    for (index, model) in models.iter().enumerate() {
        let Some(status) = model.status.clone() else { continue };
        let (connection, key) = (connection.within(&key(model).0), key(model));
        let mut meter = meters.remove(&key).unwrap_or_default();
        measuring.spawn(async move {
            let rates = meter.read(&connection, &status).await;
            (index, key, meter, rates)
        });
    }
    let mut rates = vec![Rates::default(); models.len()];
    while let Some(Ok((index, key, meter, read))) = measuring.join_next().await {
        rates[index] = read;
        meters.insert(key, meter);
    }
    let drawn: Vec<String> = models.iter().zip(&rates).map(|(model, rates)| draw(model, rates)).collect();
    Ok(drawn.join("\n"))
}
