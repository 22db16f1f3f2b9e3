//! The control service over loopback, with a stage that only remembers what it was told.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]
use std::sync::{Arc, Mutex};
use std::time::Duration;

use splitmodel_control::health::{self, HealthChecker, HealthHub, Probe, pb};
use splitmodel_control::{
    ClientError, Conditioning, ControlClient, ControlHandler, ControlService, HandlerError, Phase, ServeError,
    StageStatus, StatusHub, serve,
};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;

const WAIT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Fake {
    told: Mutex<Vec<String>>,
    first: bool,
}

impl ControlHandler for Fake {
    async fn drain(&self, grace: Option<Duration>) -> Result<(), HandlerError> {
        self.told.lock().unwrap().push(format!("drain {grace:?}"));
        Ok(())
    }

    async fn probe(&self) -> Result<Duration, HandlerError> {
        if self.first { Ok(Duration::from_micros(1234)) } else { Err(HandlerError::Unsupported("not stage 0".into())) }
    }

    async fn form_again(&self, formation: u64, reason: String) -> Result<bool, HandlerError> {
        self.told.lock().unwrap().push(format!("form again after {formation}: {reason}"));
        Ok(formation == 7)
    }

    async fn set_conditioning(&self, conditioning: Conditioning) -> Result<(), HandlerError> {
        self.told.lock().unwrap().push(format!("{conditioning:?}"));
        Ok(())
    }
}

struct Running {
    address: String,
    hub: StatusHub,
    handler: Arc<Fake>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

async fn start(first: bool) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let hub = StatusHub::new(StageStatus { chain: "c".into(), stages: 2, total_bytes: 100, ..StageStatus::default() });
    let handler = Arc::new(Fake { first, ..Fake::default() });
    let service = ControlService::new(hub.clone(), Arc::clone(&handler));
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(async move {
        serve(listener, service, None, async {
            stopped.await.ok();
        })
        .await
    });
    Running { address, hub, handler, stop, task }
}

#[tokio::test]
async fn status_is_streamed_and_only_changes_are() {
    let stage = start(true).await;
    let mut client = ControlClient::connect(&stage.address, WAIT).await.unwrap();
    let mut stream = client.watch(Duration::from_millis(1)).await.unwrap();
    let first = stream.next().await.unwrap().unwrap();
    assert_eq!((first.chain.as_str(), first.stages, first.total_bytes), ("c", 2, 100));

    stage.hub.update(|_| {});
    stage.hub.update(|s| s.total_bytes = 100);
    let hub = stage.hub.clone();
    std::thread::spawn(move || hub.set_phase(Phase::Loading)).join().unwrap();
    let second = stream.next().await.unwrap().unwrap();
    assert_eq!(second.phase(), Phase::Loading, "the updates that changed nothing were not sent");

    stage.hub.set_error("disk full", true);
    let third = stream.next().await.unwrap().unwrap();
    assert_eq!((third.phase(), third.last_error.as_str()), (Phase::Failed, "disk full"));
    assert_eq!(client.status().await.unwrap().last_error, "disk full");
}

#[tokio::test]
async fn many_changes_become_one_message() {
    let stage = start(true).await;
    let mut client = ControlClient::connect(&stage.address, WAIT).await.unwrap();
    let mut stream = client.watch(Duration::from_millis(50)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    for n in 1..=10_000 {
        stage.hub.update(|s| s.generated_tokens = n);
    }
    let mut messages = 0;
    loop {
        messages += 1;
        if stream.next().await.unwrap().unwrap().generated_tokens == 10_000 {
            break;
        }
    }
    assert!(messages < 1000, "{messages} messages for 10,000 changes");
}

#[tokio::test]
async fn shutdown_ends_streams_in_order_even_between_two_messages() {
    let stage = start(true).await;
    let mut client = ControlClient::connect(&stage.address, WAIT).await.unwrap();
    let mut stream = client.watch(Duration::from_secs(3600)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    stage.hub.set_phase(Phase::Draining);
    stage.stop.send(()).unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().phase(), Phase::Draining);
    assert!(stream.next().await.unwrap().is_none());
    drop(client);
    stage.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn orders_reach_the_handler() {
    let stage = start(true).await;
    let mut client = ControlClient::connect(&stage.address, WAIT).await.unwrap();
    client.drain(None).await.unwrap();
    client.drain(Some(Duration::from_millis(1500))).await.unwrap();
    let conditioning = Conditioning { delay: Duration::from_micros(70), bytes_per_second: 1 << 33 };
    client.set_conditioning(conditioning).await.unwrap();
    assert_eq!(client.probe().await.unwrap(), Duration::from_micros(1234));
    assert!(client.form_again(7, "stage 1 moved").await.unwrap());
    assert!(!client.form_again(6, "late").await.unwrap());
    assert_eq!(
        *stage.handler.told.lock().unwrap(),
        [
            "drain None".to_owned(),
            "drain Some(1.5s)".to_owned(),
            format!("{conditioning:?}"),
            "form again after 7: stage 1 moved".to_owned(),
            "form again after 6: late".to_owned(),
        ]
    );
}

#[tokio::test]
async fn refusals_keep_their_words_and_class() {
    let stage = start(false).await;
    let mut client = ControlClient::connect(&stage.address, WAIT).await.unwrap();
    let error = client.probe().await.unwrap_err();
    assert!(matches!(error, ClientError::Refused { code: Code::Unimplemented, method: "ProbeChain", .. }), "{error:?}");
    assert!(error.to_string().contains("not stage 0") && error.to_string().contains(&stage.address), "{error}");
}

#[tokio::test]
async fn what_is_no_control_service_is_named() {
    for bad in ["localhost", ":80", "h:http", "a b:80"] {
        let error = ControlClient::connect(bad, WAIT).await.unwrap_err();
        assert!(matches!(error, ClientError::Address { .. }), "{error:?}");
    }
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let error = ControlClient::connect(&free, WAIT).await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error:?}");
    assert!(error.to_string().contains(&free), "{error}");

    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let short = Duration::from_millis(200);
    let error = match ControlClient::connect(&address, short).await {
        Ok(mut client) => client.status().await.unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error, ClientError::Timeout { .. }), "{error:?}");
}

async fn health_of(address: &str, service: &str) -> pb::health_check_response::ServingStatus {
    let channel =
        tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let mut client = pb::health_client::HealthClient::new(channel);
    let request = pb::HealthCheckRequest { service: service.into() };
    client.check(request).await.unwrap().into_inner().status()
}

#[tokio::test]
async fn health_answers_each_probe() {
    use pb::health_check_response::ServingStatus::{NotServing, Serving};
    let (hub, service) = HealthHub::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(health::serve(listener, service, async {
        stopped.await.ok();
    }));
    assert_eq!(health_of(&address, Probe::Startup.name()).await, Serving);
    assert_eq!(health_of(&address, Probe::Liveness.name()).await, Serving);
    assert_eq!(health_of(&address, "").await, NotServing);
    hub.set(Probe::Readiness, true).await;
    assert_eq!(health_of(&address, "readiness").await, Serving);
    assert_eq!(health_of(&address, "").await, Serving);
    hub.set(Probe::Liveness, false).await;
    assert_eq!(health_of(&address, "liveness").await, NotServing);
    stop.send(()).unwrap();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_checker_tells_silence_from_a_bad_answer_and_comes_back() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut checker = HealthChecker::new(&address.to_string(), WAIT).unwrap();
    let mut hasty = HealthChecker::new(&address.to_string(), Duration::from_millis(200)).unwrap();
    // Connections are made and nobody answers, as with a stopped process.
    let error = hasty.check(Probe::Liveness).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { method: "liveness", .. }), "{error:?}");
    drop(listener);
    let error = checker.check(Probe::Liveness).await.unwrap_err();
    assert!(matches!(error, ClientError::Refused { code: Code::Unavailable, .. }), "{error:?}");

    let (hub, service) = HealthHub::new().await;
    let listener = TcpListener::bind(address).await.unwrap();
    tokio::spawn(health::serve(listener, service, std::future::pending()));
    assert!(checker.check(Probe::Liveness).await.unwrap());
    assert!(!checker.check(Probe::Readiness).await.unwrap());
    hub.set(Probe::Liveness, false).await;
    assert!(!checker.check(Probe::Liveness).await.unwrap());
    assert!(matches!(HealthChecker::new("here", WAIT), Err(ClientError::Address { .. })));
}
