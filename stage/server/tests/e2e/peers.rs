//! Peers that speak the protocol and do not keep to it: each is told so, and the chain goes on.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use splitmodel_link::frame::{ErrorClass, Frame, Predictions, Report};
use splitmodel_link::setup::{Hello, InstanceId, Refusal, RefusalCode, Role, Setup, read_hello, write_refusal};
use splitmodel_link::{
    Acceptor, Answer, ClosedReason, Connection, Dialer, Event, LinkError, Message, Options, Receiver, accept, dial,
};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::PATIENCE;
use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::peer;
use crate::harness::plan::Plan;

const PROMPT: [i32; 4] = [30, 31, 32, 33];

/// The place of stage 0 in a chain of two.
struct First {
    listener: TcpListener,
    setup: Setup,
    to: SocketAddr,
}

impl First {
    /// Forms the chain: the data and the return connection.
    async fn form(&mut self) -> (Connection, Connection) {
        self.setup.formation += 1;
        let back = Setup { role: Role::Return, ..self.setup.clone() };
        let decide = move |_: &Setup| Ok(Answer { setup: back.clone(), peer_name: String::new() });
        let acceptor = Acceptor {
            tls: None,
            decide: Arc::new(decide),
            options: Options::default(),
            deadline: Duration::from_secs(20),
        };
        let dialer = peer::dialer(self.setup.clone());
        let both = async {
            tokio::join!(dialed(self.to, &dialer), async {
                let (stream, _) = self.listener.accept().await.unwrap();
                accept(stream, &acceptor).await
            })
        };
        let (data, returned) = tokio::time::timeout(PATIENCE, both).await.unwrap();
        (data, returned.unwrap().0)
    }
}

/// Dials until the stage has seen that its stage 0 is gone.
async fn dialed(to: SocketAddr, dialer: &Dialer) -> Connection {
    loop {
        match dial(to, dialer).await {
            Ok((connection, _)) => return connection,
            Err(LinkError::Refused(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(other) => panic!("{other}"),
        }
    }
}

/// The error that ends a connection.
async fn told(receiver: &mut Receiver) -> Report {
    let mut told = None;
    loop {
        match tokio::time::timeout(PATIENCE, receiver.next()).await.unwrap() {
            Some(Event::Message(inbound)) => match inbound.message {
                Message::Error(report) => told = Some(report),
                other => panic!("{other:?}"),
            },
            Some(Event::Closed(ClosedReason::Refused(report))) => {
                assert_eq!(told, Some(report.clone()));
                return report;
            }
            other => panic!("{other:?} after {told:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_in_the_wrong_direction_are_answered_by_a_protocol_error() {
    let mut chain = Chain::start(&Plan::tiny(&[0, 3, 8])).await;
    chain.stages[0].kill();
    let listener = TcpListener::bind(chain.configs[0].link.bind).await.unwrap();
    let mut first = First { listener, setup: peer::setup(&chain, Role::Data, 0), to: chain.configs[1].link.bind };

    let (mut data, mut back) = first.form().await;
    let predictions = Predictions { seq: 0, sections: Vec::new(), records: Vec::new() };
    data.sender.send(Message::Predictions(predictions)).await.unwrap();
    let report = told(&mut data.receiver).await;
    assert_eq!((report.stage, report.class), (1, ErrorClass::Protocol), "{report:?}");
    assert!(report.message.contains("predictions"), "{report:?}");
    assert!(matches!(back.receiver.next().await, Some(Event::Closed(_))), "the formation is over");

    let (mut data, mut back) = first.form().await;
    back.sender.send(Message::Frame(Frame::default())).await.unwrap();
    let report = told(&mut back.receiver).await;
    assert_eq!((report.stage, report.class), (1, ErrorClass::Protocol), "{report:?}");
    assert!(report.message.contains("a frame"), "{report:?}");
    let report = told(&mut data.receiver).await;
    assert_eq!((report.stage, report.class), (1, ErrorClass::PeerLost), "upstream learns what happened: {report:?}");

    drop((first, data, back));
    chain.restart(0);
    chain.ready().await;
    chain.client.ask(&request(1, &PROMPT, 5)).await;
    chain.end().await;
}

/// Stage 0's process, as every setup names it.
async fn root(chain: &Chain) -> InstanceId {
    InstanceId(u128::from_str_radix(&chain.status(0).await.instance, 16).unwrap())
}

fn refusal(outcome: Result<(Connection, splitmodel_link::Agreed), LinkError>) -> Refusal {
    match outcome {
        Err(LinkError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ghosts_of_older_formations_are_fenced_everywhere() {
    let mut chain = Chain::start(&Plan::tiny(&[0, 2, 5, 8])).await;
    let old = chain.status(0).await.formation;
    chain.stages[2].kill();
    chain.not_ready().await;
    chain.restart(2);
    chain.ready().await;
    let (now, root) = (chain.status(0).await.formation, root(&chain).await);
    assert!(now > old);
    let want = chain.client.ask(&request(1, &PROMPT, 50)).await;
    for formation in [old, now] {
        for (role, from, to) in [(Role::Data, 0, 1), (Role::Data, 1, 2), (Role::Return, 2, 0)] {
            if (to, formation) == (0, now) {
                continue; // no ghost: the test below
            }
            let ghost = Setup { formation, root, ..peer::setup(&chain, role, from) };
            let refusal = refusal(dial(chain.configs[to].link.bind, &peer::dialer(ghost)).await);
            println!("stage {to}: {refusal}");
            assert_eq!(refusal.code, RefusalCode::Formation, "{refusal}");
            assert_eq!((refusal.ours, refusal.theirs), (now.to_string(), formation.to_string()));
        }
    }
    assert_eq!(chain.client.ask(&request(1, &PROMPT, 50)).await.text, want.text);
    assert_eq!(chain.status(0).await.formation, now, "no link was lost");
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_stage_0_does_not_fight_with_its_successor() {
    let mut chain = Chain::start(&Plan::tiny(&[0, 3, 8])).await;
    let root = root(&chain).await;
    let mut ghost = peer::setup(&chain, Role::Data, 0);
    ghost.root = InstanceId(root.0 - (1 << 80));
    let to = chain.configs[1].link.bind;
    let now = chain.status(0).await.formation;
    let told = refusal(dial(to, &peer::dialer(ghost.clone())).await);
    assert_eq!((told.code, told.field.as_str()), (RefusalCode::Formation, "root"), "{told}");
    assert_eq!((told.ours, told.theirs), (root.to_string(), ghost.root.to_string()));
    chain.client.ask(&request(1, &PROMPT, 20)).await;
    assert_eq!(chain.status(0).await.formation, now, "no link was lost");

    // Where nobody holds the stage, it may be the only one there is; and then its successor comes.
    chain.stages[0].kill();
    let listener = TcpListener::bind(chain.configs[0].link.bind).await.unwrap();
    let mut first = First { listener, setup: ghost.clone(), to };
    let (mut data, back) = first.form().await;
    drop(first.listener);
    chain.restart(0);
    chain.ready().await;
    assert!(matches!(data.receiver.next().await, Some(Event::Closed(_))), "the successor took its place");
    drop(back);
    ghost.formation = 9;
    assert_eq!(refusal(dial(to, &peer::dialer(ghost)).await).field, "root");
    chain.client.ask(&request(1, &PROMPT, 20)).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_nobody_takes_are_bounded_and_the_next_is_told_busy() {
    let mut chain = Chain::start(&Plan::tiny(&[0, 2, 5, 8])).await;
    let (formation, root) = (chain.status(0).await.formation, root(&chain).await);
    let twin = Setup { formation, root, ..peer::setup(&chain, Role::Return, 2) };
    let mut held = Vec::new();
    let refusal = loop {
        match dial(chain.configs[0].link.bind, &peer::dialer(twin.clone())).await {
            Ok(connection) => held.push(connection),
            Err(LinkError::Refused(refusal)) => break refusal,
            Err(other) => panic!("{other}"),
        }
        assert!(held.len() < 100, "no end of it");
    };
    println!("after {}: {refusal}", held.len());
    assert_eq!(refusal.code, RefusalCode::Busy);
    // None of them takes the place of the last stage, neither in this formation nor in the next.
    chain.client.ask(&request(1, &PROMPT, 20)).await;
    chain.stages[2].kill();
    chain.not_ready().await;
    chain.restart(2);
    chain.ready().await;
    chain.client.ask(&request(1, &PROMPT, 20)).await;
    chain.end().await;
}

/// Stands before a stage: refuses the first `count` connections as busy, and hands the others on. Notes the formation of
/// those it refused.
async fn doorman(listener: TcpListener, to: SocketAddr, count: usize, refused: Arc<Mutex<Vec<u64>>>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        if refused.lock().unwrap().len() < count {
            let Ok(Hello::Setup(theirs, _)) = read_hello(&mut stream).await else { panic!("a setup") };
            let busy = Refusal::new(RefusalCode::Busy, "a moment, please");
            write_refusal(&mut stream, &busy).await.unwrap();
            refused.lock().unwrap().push(theirs.formation);
            continue;
        }
        tokio::spawn(async move {
            if let Ok(mut far) = TcpStream::connect(to).await {
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut far).await; // ends with either
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_stage_is_tried_again_in_the_same_formation() {
    const COUNT: usize = 4;
    let refused = Arc::<Mutex<Vec<u64>>>::default();
    let mut door = None;
    let mut chain = Chain::spawn_with(&Plan::tiny(&[0, 2, 5, 8]), |configs| {
        let to = configs[2].link.bind;
        let listener = std::net::TcpListener::bind((to.ip(), 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        configs[1].link.downstream = Some(listener.local_addr().unwrap().to_string());
        let listener = TcpListener::from_std(listener).unwrap();
        door = Some(tokio::spawn(doorman(listener, to, COUNT, Arc::clone(&refused))));
    });
    chain.ready().await;
    let formation = chain.status(0).await.formation;
    assert_eq!(*refused.lock().unwrap(), [formation; COUNT]);
    chain.client.ask(&request(1, &PROMPT, 5)).await;
    chain.end().await;
    door.unwrap().abort();
}
