//! Models from real HTTP servers: good ones, bad ones, and those that break off.

#![cfg(test)]
#![allow(clippy::print_stdout, reason = "children tell their parents")]

#[path = "common/server.rs"]
mod server;

use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use server::{Fault, Served, Server, retry_after};
use splitmodel_fetch::{FetchError, HttpError, Options, Patience, http_error, is_permanent, open};
use splitmodel_gguf::tiny::{Arch, Tiny};
use splitmodel_gguf::{Error, Model, Package, SlicePlan};

const FILE: &str = "/o/r/resolve/main/m.gguf";
const SOURCE: &str = "hf://o/r/m.gguf";

/// The bytes of a tiny model of about 4 MB.
fn tiny() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Tiny::new(Arch::Llama).write(&path).unwrap();
    std::fs::read(path).unwrap()
}

fn serving(bytes: Vec<u8>) -> Server {
    let server = Server::start();
    server.shared.put(FILE, Served::new(bytes));
    server
}

fn options(server: &Server) -> Options {
    let patience = Patience {
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(5),
        stall: Duration::from_secs(1),
        ..Patience::default()
    };
    Options { patience, hf_endpoint: server.url(""), ..Options::default() }
}

fn package(model: &Model, package: Package) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    SlicePlan::new(model, package)?.write_to("out", &mut out, &mut |_, _| {})?;
    Ok(out)
}

/// What is wrong with the way to the model.
fn problem(server: &Server) -> HttpError {
    match open(SOURCE, &options(server)) {
        Err(FetchError::Gguf(e)) => {
            println!("{e}");
            assert!(e.to_string().starts_with(&server.url(FILE)), "{e}");
            http_error(&e).unwrap().clone()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn slices_are_those_of_the_file_and_nothing_else_crosses_the_network() {
    let bytes = tiny();
    let local = Model::from_sources(vec![Arc::new(bytes.clone())]).unwrap();
    let server = serving(bytes);
    let beats = Arc::new(AtomicU64::new(0));
    let count = beats.clone();
    let alive = Arc::new(move || {
        count.fetch_add(1, Relaxed);
    });
    let remote = open(SOURCE, &Options { alive, ..options(&server) }).unwrap();
    assert_eq!(remote.digest(), local.digest());
    let header = server.shared.sent();
    let seen = server.shared.seen();
    assert!(seen.len() < 70 && header < 400_000, "{} requests, {header} bytes", seen.len());
    assert!(beats.load(Relaxed) >= seen.len() as u64);
    for (package_, requests) in [
        (Package::Stage { first: 2, end: 5 }, 1),
        (Package::Stage { first: 6, end: 8 }, 2),
        (Package::Embedding, 0),
        (Package::Tokenizer, 0),
    ] {
        server.shared.forget();
        assert_eq!(package(&remote, package_).unwrap(), package(&local, package_).unwrap());
        let plan = SlicePlan::new(&local, package_).unwrap();
        let sent = server.shared.sent();
        assert!(sent <= plan.total_bytes(), "{package_}: {sent} bytes for {}", plan.total_bytes());
        let seen = server.shared.seen();
        assert_eq!(seen.len(), requests, "{package_}: {seen:?}");
    }
}

#[test]
fn large_headers_take_few_requests() {
    let mut layout = splitmodel_gguf::encode::Layout::default();
    layout.set("general.architecture", splitmodel_gguf::value::OwnedValue::str("llama"));
    let words: Vec<_> = (0..200_000).map(|i| format!("a word that is number {i}")).collect();
    layout.set("words", splitmodel_gguf::value::OwnedValue::strs(&words));
    let server = serving(layout.encode("m").unwrap().header);
    open(SOURCE, &options(&server)).unwrap();
    let seen = server.shared.seen();
    assert!(seen.len() <= 8, "{seen:?}");
}

#[test]
fn shards_are_found_beside_one_another() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Tiny::new(Arch::Qwen3).write_shards(&dir.path().join("m"), 3).unwrap();
    let local = Model::open(&paths[0]).unwrap();
    let server = Server::start();
    for path in &paths {
        let name = path.file_name().unwrap().to_str().unwrap();
        server.shared.put(&format!("/o/r/resolve/v1/d/{name}"), Served::new(std::fs::read(path).unwrap()));
    }
    for shard in ["m-00001-of-00003", "m-00003-of-00003"] {
        let remote = open(&format!("hf://o/r@v1/d/{shard}.gguf"), &options(&server)).unwrap();
        assert_eq!(remote.digest(), local.digest());
        let stage = Package::Stage { first: 0, end: 8 };
        assert_eq!(package(&remote, stage).unwrap(), package(&local, stage).unwrap());
    }
    server.shared.files.lock().unwrap().remove("/o/r/resolve/v1/d/m-00002-of-00003.gguf");
    let error = open("hf://o/r@v1/d/m-00001-of-00003.gguf", &options(&server)).unwrap_err();
    assert!(error.to_string().contains("m-00002-of-00003.gguf") && error.is_permanent(), "{error}");
}

#[test]
fn what_breaks_off_goes_on_where_it_was() {
    let bytes = tiny();
    let local = Model::from_sources(vec![Arc::new(bytes.clone())]).unwrap();
    let server = serving(bytes);
    let remote = open(SOURCE, &options(&server)).unwrap();
    server.shared.forget();
    let faults = [
        Fault::Cut(100_000),
        Fault::Status(503, None),
        Fault::Stall(200_000),
        retry_after(429, "0"),
        Fault::Cut(0),
        Fault::Status(502, None),
        Fault::Cut(1),
        Fault::Stall(0),
    ];
    server.shared.fault(faults);
    let stage = Package::Stage { first: 0, end: 5 };
    assert_eq!(package(&remote, stage).unwrap(), package(&local, stage).unwrap());
    let seen = server.shared.seen();
    assert_eq!(seen.len(), 9);
    let starts: Vec<_> = seen.iter().map(|s| s.range.start - seen[0].range.start).collect();
    assert_eq!(starts, [0, 100_000, 100_000, 300_000, 300_000, 300_000, 300_000, 300_001, 300_001]);
    assert!(server.shared.sent() <= SlicePlan::new(&local, stage).unwrap().total_bytes());
}

#[test]
fn a_server_that_stays_away_is_given_up_in_words() {
    let server = serving(tiny());
    server.shared.fault(vec![Fault::Status(503, None); 8]);
    let problem_ = problem(&server);
    assert!(matches!(&problem_, HttpError::GaveUp { tries: 8, last } if matches!(**last, HttpError::Busy { .. })));
    assert!(!problem_.is_permanent());
    assert_eq!(server.shared.seen().len(), 8);
    server.shared.fault(vec![Fault::Stall(10); 1]);
    server.shared.fault(vec![Fault::Stall(0); 8]);
    let problem_ = problem(&server);
    assert!(matches!(&problem_, HttpError::GaveUp { last, .. } if matches!(**last, HttpError::Stalled(_))));
    let gone = {
        let server = Server::start();
        options(&server)
    };
    let error = open(SOURCE, &gone).unwrap_err();
    assert!(error.to_string().contains("refused") && error.to_string().contains("network policy"), "{error}");
    assert!(!error.is_permanent());
}

#[test]
fn a_server_may_ask_for_a_pause_up_to_a_bound() {
    let server = serving(tiny());
    server.shared.fault([retry_after(429, "1"), retry_after(503, "Fri, 31 Dec 1999 23:59:59 GMT")]);
    let begun = std::time::Instant::now();
    open(SOURCE, &options(&server)).unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1));
    server.shared.fault([retry_after(429, "100000")]);
    let mut options = options(&server);
    options.patience.longest_asked = Duration::from_millis(10);
    open(SOURCE, &options).unwrap();
}

#[test]
fn refusals_say_what_to_do() {
    let server = serving(tiny());
    let status = |code| {
        server.shared.fault([Fault::Status(code, None)]);
        let problem = problem(&server);
        assert!(problem.is_permanent());
        problem.to_string()
    };
    for code in [401, 403] {
        assert!(status(code).contains("give credentials"), "{code}");
    }
    assert!(status(404).contains("check owner, repository, revision and path"));
    assert!(status(400).contains("HTTP 400"));
    assert!(status(304).contains("HTTP 304"));
    assert_eq!(server.shared.seen().len(), 5, "none is tried again");
    server.shared.files.lock().unwrap().clear();
    assert!(problem(&server).to_string().contains("(Entry not found)"));
    server.shared.put(FILE, Served::new(Vec::new()));
    assert_eq!(problem(&server), HttpError::Empty);
    server.shared.put(FILE, Served { ranges: false, ..Served::new(tiny()) });
    assert_eq!(problem(&server), HttpError::NoRanges(200));
}

#[test]
fn a_file_that_changes_is_found_out() {
    let bytes = tiny();
    let server = serving(bytes.clone());
    let stage = Package::Stage { first: 0, end: 5 };
    let changed = |change: &dyn Fn(&mut Served), what: &str| {
        server.shared.put(FILE, Served { modified: Some("yesterday"), ..Served::new(bytes.clone()) });
        let remote = open(SOURCE, &options(&server)).unwrap();
        server.shared.change(FILE, |file| change(file));
        let error = package(&remote, stage).unwrap_err();
        assert!(matches!(http_error(&error), Some(HttpError::Changed { what: w, .. }) if *w == what), "{error}");
        assert!(!is_permanent(&error));
    };
    changed(&|file| file.etag = Some("\"two\""), "ETag");
    changed(&|file| file.etag = None, "ETag");
    changed(&|file| file.bytes = [&file.bytes[..], b"more"].concat().into(), "size");
    changed(&|file| file.bytes = file.bytes.slice(..100_000), "size");
    // In the middle of the download, which stalls.
    server.shared.put(FILE, Served { etag: None, modified: Some("yesterday"), ..Served::new(bytes.clone()) });
    let remote = open(SOURCE, &options(&server)).unwrap();
    server.shared.fault([Fault::Stall(100_000)]);
    let plan = SlicePlan::new(&remote, stage).unwrap();
    let change = &mut |done, _| {
        if done > 50_000 {
            server.shared.change(FILE, |file| file.modified = Some("today"));
        }
    };
    let error = plan.write_to("out", &mut io::sink(), change).unwrap_err();
    assert!(matches!(http_error(&error), Some(HttpError::Changed { what: "Last-Modified", .. })), "{error}");
}

#[test]
fn credentials_go_to_their_own_host_only() {
    let (server, other) = (serving(tiny()), Server::start());
    other.shared.put("/signed", Served::new(tiny()));
    server.shared.put("/o/r/resolve/main/m", Served::new(tiny()));
    server.shared.change(FILE, |file| file.elsewhere = Some(other.url("/signed?signature=hidden")));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("token"), "hf_hidden\n").unwrap();
    let options = Options { credentials: Some(dir.path().to_owned()), ..options(&server) };
    let remote = open(SOURCE, &options).unwrap();
    package(&remote, Package::Stage { first: 0, end: 8 }).unwrap();
    let (own, theirs) = (server.shared.seen(), other.shared.seen());
    assert!(theirs.iter().all(|s| s.path == "/signed"));
    assert!(own.iter().all(|s| s.authorization.as_deref() == Some("Bearer hf_hidden")), "{own:?}");
    assert!(theirs.iter().all(|s| s.authorization.is_none()), "{theirs:?}");
    assert!(own.len() <= 2 && theirs.len() > 20, "the place is asked for once: {own:?}");

    // Signed addresses expire; errors show none of them.
    server.shared.forget();
    other.shared.fault([Fault::Status(403, None)]);
    package(&remote, Package::Stage { first: 0, end: 8 }).unwrap();
    assert_eq!(server.shared.seen().len(), 1);
    other.shared.files.lock().unwrap().clear();
    let error = package(&remote, Package::Stage { first: 0, end: 8 }).unwrap_err().to_string();
    assert!(!error.contains("hidden"), "{error}");

    server.shared.fault([Fault::Status(403, None)]);
    let error = open(SOURCE, &options).unwrap_err().to_string();
    assert!(error.contains("may not read it") && !error.contains("hidden"), "{error}");
    server.shared.fault([Fault::To("ftp://h/hidden".into())]);
    assert!(matches!(problem(&server), HttpError::Redirect(_)));
    server.shared.fault((0..20).map(|i| Fault::To(server.url(&format!("/{i}")))));
    assert!(matches!(problem(&server), HttpError::Redirect(_)));
    assert_eq!(server.shared.faults.lock().unwrap().len(), 9, "ten are followed");
}

#[test]
fn slow_bytes_are_signs_of_life_and_silence_is_not() {
    let server = serving(tiny());
    let beats = Arc::new(AtomicU64::new(0));
    let count = beats.clone();
    let mut options = options(&server);
    options.alive = Arc::new(move || {
        count.fetch_add(1, Relaxed);
    });
    let remote = open(SOURCE, &options).unwrap();
    server.shared.pace.store(400_000, Relaxed);
    beats.store(0, Relaxed);
    package(&remote, Package::Stage { first: 2, end: 3 }).unwrap();
    assert!(beats.load(Relaxed) > 10, "each piece is one");
    server.shared.fault(vec![Fault::Stall(0); 8]);
    beats.store(0, Relaxed);
    assert!(package(&remote, Package::Stage { first: 2, end: 3 }).is_err());
    assert_eq!(beats.load(Relaxed), 0);
}

#[test]
fn several_segments_are_under_way_at_once_and_in_order() {
    let bytes: Vec<u8> = (0..50_000_000u32).map(|i| (i >> 8) as u8 ^ i as u8).collect();
    let mut layout = splitmodel_gguf::encode::Layout::default();
    layout.set("general.architecture", splitmodel_gguf::value::OwnedValue::str("llama"));
    let name = "token_embd.weight".to_owned();
    let ty = splitmodel_gguf::TensorType::F32;
    layout.push(splitmodel_gguf::encode::TensorSpec { name, dims: vec![bytes.len() as u64 / 4], ty });
    let mut file = layout.encode("m").unwrap().header;
    file.extend(&bytes);
    let server = serving(file);
    let mut options = options(&server);
    options.patience.stall = Duration::from_secs(30);
    let remote = open(SOURCE, &options).unwrap();
    server.shared.forget();
    server.shared.fault([Fault::None, Fault::Cut(5_000_000), Fault::Cut(1_000_000), Fault::Status(500, None)]);
    let written = package(&remote, Package::Embedding).unwrap();
    assert!(written.ends_with(&bytes));
    // What the connections that were cut had not handed on yet was sent twice.
    assert!(server.shared.sent() <= bytes.len() as u64 + 2_000_000, "{} bytes", server.shared.sent());
    assert!(server.shared.seen().len() >= 6 + 3);
}

/// What processes with an environment of their own run.
#[test]
#[ignore = "run by other tests, as a process of its own"]
fn child() {
    let Ok(source) = std::env::var("FETCH_TEST_SOURCE") else { return };
    match open(&source, &Options { patience: Patience { tries: 2, ..Patience::default() }, ..Options::default() }) {
        Ok(model) => println!("opened {}", model.digest()),
        Err(e) => println!("failed {e}"),
    }
}

fn in_child(source: &str, environment: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]).env("FETCH_TEST_SOURCE", source);
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    let mut child = command.envs(environment.iter().copied()).stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    text
}

#[test]
fn a_private_authority_is_trusted_by_its_bundle_and_not_without() {
    let server = serving(tiny());
    server.shared.put("/m.gguf", Served::new(tiny()));
    let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let config = tokio_rustls::rustls::ServerConfig::builder_with_provider(Arc::new(
        tokio_rustls::rustls::crypto::ring::default_provider(),
    ))
    .with_safe_default_protocol_versions()
    .unwrap()
    .with_no_client_auth()
    .with_single_cert(vec![own.cert.der().clone()], own.signing_key.serialize_der().try_into().unwrap())
    .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let plain = server.address;
    let listener = server.runtime().block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let source = format!("https://localhost:{}/m.gguf", listener.local_addr().unwrap().port());
    // TLS in front of the plain server.
    server.runtime().spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut outside) = acceptor.accept(stream).await else { return };
                let mut inside = tokio::net::TcpStream::connect(plain).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await; // either side may leave
            });
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("ca.pem");
    std::fs::write(&bundle, own.cert.pem()).unwrap();
    let text = in_child(&source, &[("SSL_CERT_FILE", bundle.to_str().unwrap())]);
    assert!(text.contains("opened "), "{text}");
    let text = in_child(&source, &[]);
    assert!(text.contains("failed ") && text.contains("SSL_CERT_FILE"), "{text}");
}

#[test]
fn proxies_are_those_of_the_environment() {
    let proxy = Server::start();
    proxy.shared.put(FILE, Served::new(tiny()));
    let endpoint = ("HF_ENDPOINT", "http://hub.example");
    let address = proxy.url("");
    let text = in_child(SOURCE, &[endpoint, ("http_proxy", &address)]);
    assert!(text.contains("opened "), "{text}");
    assert!(proxy.shared.seen().iter().all(|s| s.host == "hub.example"));
    let text = in_child(SOURCE, &[endpoint, ("http_proxy", &address), ("NO_PROXY", ".example")]);
    assert!(text.contains("failed http://hub.example"), "{text}");
}
