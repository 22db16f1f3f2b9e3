//! Tokens per second of chains, from two readings of what their first stages count.
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::Client;
use splitmodel_api::{Phase, SplitModelStatus};
use splitmodel_topology::names;

use super::connect::Connection;
use super::draw::Rates;
use super::forward::{self, Forward};
use crate::http;

/// Between the first two readings.
const BETWEEN: Duration = Duration::from_secs(1);
/// Time for one reading.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of a reading.
const MAX_BODY: usize = 4 << 20;
/// What is counted.
const COUNTER: &str = "splitmodel_generated_tokens_total";

/// Reads the counters of one SplitModel's chains.
#[derive(Default)]
pub struct Meter {
    probes: BTreeMap<i32, Probe>,
}

/// The counter of one pod.
struct Probe {
    pod: String,
    forward: Forward,
    client: Client,
    /// Why the last connection failed.
    trouble: Arc<Mutex<Option<String>>>,
    last: Option<(Instant, f64)>,
}

impl Meter {
    /// The rates of the chains that serve; of the first call they are of one second, then of the time since the last.
    pub async fn read(&mut self, connection: &Connection, status: &SplitModelStatus) -> Rates {
        let mut rates = Rates::default();
        let serving: BTreeMap<i32, &str> = status
            .chains
            .iter()
            .filter(|c| c.phase == Phase::Serving)
            .filter_map(|c| Some((c.index, c.stages.first()?.pod.as_deref()?)))
            .collect();
        self.probes.retain(|chain, probe| serving.get(chain) == Some(&probe.pod.as_str()));
        for (chain, pod) in serving {
            if let Entry::Vacant(place) = self.probes.entry(chain) {
                match Probe::open(connection, pod).await {
                    Ok(probe) => {
                        place.insert(probe);
                    }
                    Err(why) => rates.note = Some(format!("chain {chain}: {why}")),
                }
            }
        }
        if self.probes.values().any(|p| p.last.is_none()) {
            self.readings(&mut rates).await;
            if self.probes.values().any(|p| p.last.is_some()) {
                tokio::time::sleep(BETWEEN).await;
            }
        }
        self.readings(&mut rates).await;
        rates
    }

    /// Reads all of them at once.
    async fn readings(&mut self, rates: &mut Rates) {
        let mut reading = tokio::task::JoinSet::new();
        for (chain, probe) in &self.probes {
            let (chain, client, url) =
                (*chain, probe.client.clone(), format!("http://{}/metrics", probe.forward.address));
            reading.spawn(async move { (chain, Instant::now(), read(&client, &url).await) });
        }
        rates.chains.clear();
        while let Some(Ok((chain, now, read))) = reading.join_next().await {
            let Some(probe) = self.probes.get_mut(&chain) else { continue };
            match read {
                Ok(count) => {
                    if let Some((then, before)) = probe.last.replace((now, count)) {
                        let seconds = now.duration_since(then).as_secs_f64();
                        // A process that started anew counts from 0.
                        rates.chains.insert(chain, (count - before).max(0.0) / seconds.max(1e-3));
                    }
                }
                Err(why) => {
                    probe.last = None;
                    let told = probe.trouble.lock().unwrap_or_else(PoisonError::into_inner).take();
                    rates.note = Some(format!("chain {chain}: {}", told.unwrap_or(why)));
                }
            }
        }
    }
}

impl Probe {
    async fn open(connection: &Connection, pod: &str) -> Result<Self, String> {
        let trouble: Arc<Mutex<Option<String>>> = Arc::default();
        let told = trouble.clone();
        let say = move |error: &super::ClusterError| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        };
        let forward = Forward::open(connection, names::METRICS_PORT, forward::to_pod(pod), Arc::new(say))
            .await
            .map_err(|e| e.to_string())?;
        let base = http::base(&format!("http://{}", forward.address)).map_err(|e| e.to_string())?;
        let client = http::client(&base, http::Idle::Kept).map_err(|e| e.to_string())?;
        Ok(Self { pod: pod.to_owned(), forward, client, trouble, last: None })
    }
}

/// What one first stage has counted.
async fn read(client: &Client, url: &str) -> Result<f64, String> {
    let failed = |e: reqwest::Error| format!("its metrics cannot be read: {e}");
    let mut answer =
        client.get(url).timeout(TIMEOUT).send().await.map_err(failed)?.error_for_status().map_err(failed)?;
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(failed)? {
        if body.len() + chunk.len() > MAX_BODY {
            return Err("its metrics are too long".to_owned());
        }
        body.extend_from_slice(&chunk);
    }
    counter(&String::from_utf8_lossy(&body)).ok_or_else(|| format!("its metrics have no {COUNTER}"))
}

/// The counter among metrics, the sum of its series.
fn counter(metrics: &str) -> Option<f64> {
    let values = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix(COUNTER)?;
        let value = match rest.strip_prefix('{') {
            Some(labels) => labels.rsplit_once('}')?.1,
            None => rest.strip_prefix(' ')?,
        };
        value.split_whitespace().next()?.parse::<f64>().ok().filter(|v| v.is_finite())
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_found_among_metrics() {
        let text =
            "# TYPE splitmodel_generated_tokens counter\nsplitmodel_generated_tokens_total 12\nother_total 9\n# EOF\n";
        assert_eq!(counter(text), Some(12.0));
        let labelled = format!("{COUNTER}{{chain=\"a}} 7\"}} 3 1600000\n{COUNTER}{{chain=\"b\"}} 4.5\n");
        assert_eq!(counter(&labelled), Some(7.5));
        for other in ["", "splitmodel_generated_tokens_total_more 1\n", "splitmodel_generated_tokens_total x\n"] {
            assert_eq!(counter(other), None, "{other}");
        }
    }
}
