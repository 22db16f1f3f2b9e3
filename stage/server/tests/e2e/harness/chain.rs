//! A running chain.

use std::path::{Path, PathBuf};
use std::time::Duration;

use splitmodel_control::{ControlClient, Phase, StageConfig, StageStatus};
use tempfile::TempDir;

use super::client::Client;
use super::plan::Plan;
use super::process::Stage;
use super::{models, until};

/// Stage processes and how to reach them. Dropping it kills them.
pub struct Chain {
    pub configs: Vec<StageConfig>,
    pub stages: Vec<Stage>,
    pub client: Client,
    env: Vec<(&'static str, String)>,
    dir: TempDir,
}

impl Chain {
    /// Starts the chain and waits until it serves.
    pub async fn start(plan: &Plan) -> Self {
        let chain = Self::spawn(plan);
        chain.ready().await;
        chain
    }

    /// Starts the processes only.
    pub fn spawn(plan: &Plan) -> Self {
        Self::spawn_with(plan, |_| {})
    }

    /// Starts the processes with configurations that `change` has changed.
    pub fn spawn_with(plan: &Plan, change: impl FnOnce(&mut Vec<StageConfig>)) -> Self {
        let dir = tempfile::tempdir_in(models::cache()).unwrap();
        let mut configs = plan.configs(dir.path());
        change(&mut configs);
        let stages = configs.iter().map(|c| Stage::start(c, dir.path(), &plan.env)).collect();
        let client = Client::new(configs[0].api.as_ref().unwrap().bind);
        Self { configs, stages, client, env: plan.env.clone(), dir }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Waits until a token has crossed the whole chain.
    pub async fn ready(&self) {
        until("the chain to be ready", async || (self.client.status("/ready").await == Some(200)).then_some(())).await;
    }

    /// Waits until the API says that the chain is not ready.
    pub async fn not_ready(&self) {
        until("the chain not to be ready", async || {
            self.client.status("/ready").await.filter(|s| *s == 503).map(|_| ())
        })
        .await;
    }

    /// Starts a stage (again) with its configuration.
    pub fn restart(&mut self, stage: usize) {
        self.stages[stage] = Stage::start(&self.configs[stage], self.dir.path(), &self.env);
    }

    /// The control service of a stage; waits until it answers.
    pub async fn control(&self, stage: usize) -> ControlClient {
        let (config, wait) = (&self.configs[stage], Duration::from_secs(30));
        let address = config.control.bind.to_string();
        until("a control service", async || match &config.link.tls {
            Some(tls) => ControlClient::connect_tls(&address, &tls.names[stage], tls, wait).await.ok(),
            None => ControlClient::connect(&address, wait).await.ok(),
        })
        .await
    }

    pub async fn status(&self, stage: usize) -> StageStatus {
        self.control(stage).await.status().await.unwrap()
    }

    /// Waits until the status of a stage is as wanted.
    pub async fn until_status(&self, stage: usize, what: &str, check: impl Fn(&StageStatus) -> bool) -> StageStatus {
        let mut control = self.control(stage).await;
        until(&format!("stage {stage}: {what}"), async || control.status().await.ok().filter(|s| check(s))).await
    }

    /// Waits until exactly `count` lanes are in use on every stage and nobody waits.
    pub async fn until_lanes(&self, count: u32) {
        for stage in 0..self.configs.len() {
            let what = format!("{count} lanes in use");
            self.until_status(stage, &what, |s| s.lanes_used == count && s.queued == 0).await;
        }
        // What the engine is still to be told of the end of a session is under way.
        let metric = async || (self.client.metric("splitmodel_lanes_in_use").await == f64::from(count)).then_some(());
        until(&format!("{count} lanes in use at the engine of stage 0"), metric).await;
    }

    /// Waits until every stage is linked, and 0 serving.
    pub async fn until_linked(&self) {
        for stage in 0..self.configs.len() {
            let want = if stage == 0 { Phase::Serving } else { Phase::Linked };
            self.until_status(stage, "linked", |s| s.phase() == want).await;
        }
    }

    /// Tells every stage to end, and waits until all have ended in order. The files stay.
    pub async fn end(&mut self) {
        for stage in &self.stages {
            stage.terminate();
        }
        for (i, stage) in self.stages.iter_mut().enumerate() {
            let status = stage.exit().await;
            assert!(status.success(), "stage {i} ended with {status}: {}", stage.log());
        }
    }

    /// Schedule log of the last stage.
    pub fn schedule(&self) -> PathBuf {
        self.configs.last().unwrap().schedule_log.clone().unwrap()
    }
}
