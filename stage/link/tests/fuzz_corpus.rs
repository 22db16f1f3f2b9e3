//! The kept corpus of the fuzz targets and a fixed number of mutations of it, on the stable toolchain. The same every run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::PathBuf;

use common::{bytes, frame, fuzz, samples, setup};
use splitmodel_link::codec::{ActivationDtype, encode};
use splitmodel_link::setup::{Refusal, RefusalCode, Role, write_refusal, write_setup};

/// Mutated inputs per target.
const MUTATIONS: usize = 100_000;

fn folder(target: &str) -> PathBuf {
    // At run time: two checkouts that share a target folder share test binaries.
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../fuzz/corpus").join(target)
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let list = std::fs::read_dir(folder(target)).unwrap_or_else(|e| panic!("{}: {e}", folder(target).display()));
    let mut paths: Vec<_> = list.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at the edges of what fields hold.
const EDGES: [u32; 9] = [0, 1, 0x7f, 0xff, 0xffff, 0x0001_0000, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff];

fn mutate(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(input.len());
        match random.below(6) {
            _ if input.is_empty() => input.push(random.next() as u8),
            0 => input[at] ^= 1 << random.below(8),
            1 => input[at] = random.next() as u8,
            2 => input.truncate(at),
            3 => {
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                input.iter_mut().skip(at / 4 * 4).zip(edge).for_each(|(byte, new)| *byte = new);
            }
            4 => {
                let other = &seeds[random.below(seeds.len())];
                input.truncate(at);
                input.extend_from_slice(&other[random.below(other.len())..]);
            }
            _ => input.insert(at, random.next() as u8),
        }
    }
    input
}

fn run(target: &str, check: fn(&[u8])) {
    let seeds = corpus(target);
    assert!(seeds.len() >= 10, "{target} has {} seeds", seeds.len());
    seeds.iter().for_each(|seed| check(seed));
    let mut random = Random(target.len() as u64);
    for _ in 0..MUTATIONS {
        let input = mutate(&seeds, &mut random);
        // A failing input is shown by what panics; this makes it reproducible as a file.
        let outcome = std::panic::catch_unwind(|| check(&input));
        assert!(outcome.is_ok(), "{target} fails for {input:02x?}");
    }
}

#[test]
fn raw() {
    run("link_raw", fuzz::raw);
}

#[test]
fn structured() {
    run("link_structured", fuzz::structured);
}

#[test]
fn setup_document() {
    run("link_setup", fuzz::setup);
}

/// The corpus begins with messages of today's format.
#[test]
fn the_corpus_has_every_kind_of_message() {
    let seeds = corpus("link_raw");
    for (name, message) in samples() {
        assert!(seeds.contains(&bytes(&message)), "no seed is the golden {name}: run the ignored test `write_seeds`");
    }
}

#[test]
#[ignore = "writes the seeds; for after a change of the format"]
fn write_seeds() {
    let write = |target: &str, name: &str, content: &[u8]| {
        std::fs::create_dir_all(folder(target)).unwrap();
        std::fs::write(folder(target).join(name), content).unwrap();
    };
    for (name, message) in samples() {
        write("link_raw", name, &bytes(&message));
        write("link_raw", &format!("{name}-cut"), &bytes(&message)[..20]);
    }
    write("link_raw", "frame-f16", &encode(&frame(1, 5), ActivationDtype::F16).unwrap());
    write("link_raw", "frame-f32", &bytes(&frame(1, 5)));
    write("link_raw", "frame-control", &bytes(&frame(1, 0)));
    let mut random = Random(7);
    for n in 0..24 {
        let seed: Vec<u8> = (0..20 + n * 12).map(|_| random.next() as u8).collect();
        write("link_structured", &format!("random-{n}"), &seed);
    }
    for (n, role) in [Role::Data, Role::Return].into_iter().flat_map(|r| [(0, r), (1, r), (2, r)]) {
        let mut wire = Vec::new();
        fuzz::ready(write_setup(&mut wire, &setup(role, n))).unwrap();
        write("link_setup", &format!("{role}-{n}"), &wire);
        write("link_setup", &format!("{role}-{n}-cut"), &wire[..30 + usize::from(n)]);
    }
    let mut wire = Vec::new();
    fuzz::ready(write_refusal(&mut wire, &Refusal::new(RefusalCode::Busy, "later"))).unwrap();
    write("link_setup", "refusal", &wire);
}
