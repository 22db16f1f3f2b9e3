//! Certificates that are replaced while they are in use.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use common::meet::{Outcome, acceptor, dialer, meet, stage_1, tls_error, works};
use common::pki::{Ca, Files};
use splitmodel_link::tls::{TlsError, stage_name};
use splitmodel_link::{Acceptor, Dialer, TlsConfig, TlsStore};
use tempfile::TempDir;
use tracing::Level;

/// A folder into which certificates are put as Kubernetes puts a Secret: files are links into `..data`, which is a link to a
/// folder of this generation; a new generation replaces that link, in one step.
struct Mount {
    folder: TempDir,
    generations: u32,
}

const NAMES: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];

impl Mount {
    fn new(files: &Files) -> Self {
        let mut mount = Self { folder: TempDir::new().unwrap(), generations: 0 };
        mount.put(files);
        for name in NAMES {
            symlink(Path::new("..data").join(name), mount.folder.path().join(name)).unwrap();
        }
        mount
    }

    fn put(&mut self, files: &Files) {
        self.generations += 1;
        let name = format!("..generation_{}", self.generations);
        let folder = self.folder.path().join(&name);
        std::fs::create_dir(&folder).unwrap();
        for (from, to) in files.iter().zip(NAMES) {
            std::fs::copy(from, folder.join(to)).unwrap();
        }
        let [new, data] = ["..data_tmp", "..data"].map(|n| self.folder.path().join(n));
        symlink(name, &new).unwrap();
        std::fs::rename(new, data).unwrap();
    }

    fn paths(&self) -> Files {
        NAMES.map(|name| self.folder.path().join(name))
    }
}

fn store([ca, cert, key]: &Files) -> TlsStore {
    TlsStore::from_pem_files(ca, cert, key).unwrap()
}

fn same(a: &TlsConfig, b: &TlsConfig) -> bool {
    Arc::ptr_eq(&a.server, &b.server) && Arc::ptr_eq(&a.client, &b.client)
}

/// The certificate and key of stage `stage` of `ca`.
fn files(ca: &Ca, stage: u16) -> Files {
    ca.files(&stage_name("smol", stage), |_| {})
}

/// Stage 0 dials stage 1, each with a store of its own.
fn parties(zero: &Files, one: &Files) -> (Dialer, Acceptor) {
    let (mut dialer, mut acceptor) = (dialer(None), acceptor(None, stage_1));
    dialer.tls = Some((store(zero), stage_name("smol", 1)));
    acceptor.tls = Some(store(one));
    (dialer, acceptor)
}

fn rejected(outcome: Outcome) -> bool {
    matches!(tls_error(outcome), TlsError::Rejected(_))
}

#[tokio::test]
async fn a_swapped_secret_is_used_by_the_next_handshake_and_running_connections_stay() {
    let (old, new) = (Ca::new("old"), Ca::new("new"));
    let (mut zero, mut one) = (Mount::new(&files(&old, 0)), Mount::new(&files(&old, 1)));
    let (dialer, acceptor) = parties(&zero.paths(), &one.paths());
    let (near, far) = meet(&dialer, &acceptor).await;
    let ((near, _), (mut far, _)) = (near.unwrap(), far.unwrap());

    // One side only: the two have no authority in common.
    one.put(&files(&new, 1));
    let (a, b) = meet(&dialer, &acceptor).await;
    assert_eq!(tls_error(a), TlsError::UnknownCa);
    assert!(rejected(b));

    zero.put(&files(&new, 0));
    works(meet(&dialer, &acceptor).await).await;

    // Whoever still has the old one is out, also when it trusts the new authority.
    let [_, cert, key] = files(&old, 0);
    let [ca, ..] = files(&new, 7);
    let (stale, _) = parties(&[ca, cert, key], &one.paths());
    let (a, b) = meet(&stale, &acceptor).await;
    assert_eq!(tls_error(b), TlsError::UnknownCa);
    assert!(rejected(a));

    near.sender.send(common::frame(3, 2)).await.unwrap();
    assert!(far.receiver.next().await.is_some(), "the first connection goes on");
}

#[tokio::test]
async fn an_authority_is_rotated_step_by_step_without_a_gap() {
    let (old, new) = (Ca::new("old"), Ca::new("new"));
    let (mut zero, mut one) = (Mount::new(&files(&old, 0)), Mount::new(&files(&old, 1)));
    let (dialer, acceptor) = parties(&zero.paths(), &one.paths());
    let bundle = |ca: &Ca, stage: u16| {
        let [_, cert, key] = files(ca, stage);
        let path = ca.folder.path().join("bundle.pem");
        let both: Vec<u8> = [&old, &new].iter().flat_map(|ca| std::fs::read(&files(ca, 9)[0]).unwrap()).collect();
        std::fs::write(&path, both).unwrap();
        [path, cert, key]
    };
    one.put(&bundle(&old, 1));
    works(meet(&dialer, &acceptor).await).await;
    zero.put(&bundle(&old, 0));
    works(meet(&dialer, &acceptor).await).await;
    zero.put(&bundle(&new, 0));
    works(meet(&dialer, &acceptor).await).await;
    one.put(&bundle(&new, 1));
    works(meet(&dialer, &acceptor).await).await;
    one.put(&files(&new, 1));
    works(meet(&dialer, &acceptor).await).await;
    zero.put(&files(&new, 0));
    works(meet(&dialer, &acceptor).await).await;
}

/// Makes the files of `paths` look as if they had been there for an hour.
fn age(paths: &Files) {
    let then = SystemTime::now() - Duration::from_secs(3600);
    for path in paths {
        std::fs::File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
    }
}

#[tokio::test]
async fn files_that_stay_are_read_once() {
    let ca = Ca::new("chain");
    let paths = files(&ca, 0);
    let store = store(&paths);
    let first = store.current().await;
    assert!(same(&first, &store.current().await));
    assert!(same(&first, &store.clone().current().await), "clones share it");
    // Touched, but the same in content.
    age(&paths);
    assert!(same(&first, &store.current().await));
    // Long enough for the files to be told by `stat` alone.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(same(&first, &store.current().await));
    // Other content with the old times: the kernel's own time of change gives it away.
    let (authority, times) = (Ca::new("chain"), paths.each_ref().map(|p| std::fs::metadata(p).unwrap().modified()));
    for ((from, to), time) in files(&authority, 0).iter().zip(&paths).zip(times) {
        std::fs::write(to, std::fs::read(from).unwrap()).unwrap();
        std::fs::File::options().write(true).open(to).unwrap().set_modified(time.unwrap()).unwrap();
    }
    let second = store.current().await;
    assert!(!same(&first, &second));
    assert!(same(&second, &store.current().await));
}

/// Collects warnings, as a log would show them.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// The lines about `folder` since the last call.
    fn lines(&self, folder: &Path) -> Vec<String> {
        let bytes = std::mem::take(&mut *self.0.lock().unwrap());
        let folder = folder.to_str().unwrap();
        String::from_utf8(bytes).unwrap().lines().filter(|l| l.contains(folder)).map(str::to_owned).collect()
    }
}

/// The log is that of the process, because the files are read on threads of their own.
#[test]
fn files_that_cannot_be_used_leave_the_old_ones_and_are_named_once() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_max_level(Level::INFO).with_ansi(false).with_writer(move || writer.clone()).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ca = Ca::new("chain");
    let (paths, good) = (files(&ca, 0), TempDir::new().unwrap());
    let kept: Files = NAMES.map(|n| good.path().join(n));
    let restore = |from: &Files, to: &Files| {
        for (from, to) in from.iter().zip(to) {
            std::fs::copy(from, to).unwrap();
        }
    };
    restore(&paths, &kept);
    let store = store(&paths);
    let current = || runtime.block_on(store.current());
    let first = current();
    let lines = || log.lines(ca.folder.path());
    lines();

    type Fault = fn(&PathBuf);
    let faults: [(&str, Fault); 5] = [
        ("gone", |p| std::fs::remove_file(p).unwrap()),
        ("empty", |p| std::fs::write(p, "").unwrap()),
        ("half", |p| {
            let text = std::fs::read(p).unwrap();
            std::fs::write(p, &text[..text.len() / 2]).unwrap();
        }),
        ("endless", |p| std::fs::write(p, vec![b'\n'; 3 << 20]).unwrap()),
        ("another's", |p| {
            // A certificate for a certificate, a key for a key; an authority is good with any.
            let name = p.file_name().unwrap().to_str().unwrap();
            let authority = Ca::new("other");
            let other = authority.files("other", |_| {});
            let which = if name.ends_with("cert.pem") { &other[1] } else { &other[2] };
            std::fs::copy(which, p).unwrap();
        }),
    ];
    for (what, fault) in faults {
        for (i, path) in paths.iter().enumerate() {
            fault(path);
            for _ in 0..3 {
                assert!(same(&first, &current()), "{what} {i}");
            }
            let said = lines();
            assert_eq!(said.len(), 1, "{what} {i}: {said:?}");
            assert!(said[0].contains("WARN") && said[0].contains(path.to_str().unwrap()), "{what} {i}: {}", said[0]);
            restore(&kept, &paths);
            assert!(same(&first, &current()), "{what} {i}: whole again");
            assert_eq!(lines(), [""; 0]);
        }
    }

    // Replaced one after the other: the certificate waits for its key.
    let next = ca.files("next", |_| {});
    std::fs::copy(&next[1], &paths[1]).unwrap();
    assert!(same(&first, &current()));
    assert_eq!(lines().len(), 1);
    std::fs::copy(&next[2], &paths[2]).unwrap();
    let second = current();
    assert!(!same(&first, &second));
    let said = lines();
    assert!(said.len() == 1 && said[0].contains("INFO") && said[0].contains("were replaced"), "{said:?}");
    assert!(same(&second, &current()));
    assert_eq!(lines(), [""; 0]);
}

#[test]
fn what_is_wrong_at_the_start_is_an_error() {
    let ca = Ca::new("chain");
    let [authority, cert, key] = files(&ca, 0);
    std::fs::remove_file(&key).unwrap();
    match TlsStore::from_pem_files(&authority, &cert, &key) {
        Err(TlsError::File { path, .. }) => assert_eq!(path, key),
        other => panic!("{other:?}"),
    }
}
