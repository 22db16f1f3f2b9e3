//! The models that chains serve here.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use splitmodel_engine::Tokenizer;
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

/// Layers of the sample model.
pub const LAYERS: u32 = 30;

/// SmolLM2-135M-Instruct, which `make model` brings.
pub fn sample() -> PathBuf {
    let path = std::env::var_os("SPLITMODEL_SAMPLE_MODEL").map_or_else(
        || {
            let home = std::env::var_os("HOME").unwrap_or_default();
            Path::new(&home).join(".cache/splitmodel/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    assert!(path.is_file(), "the sample model is not at {}: run `make model` first", path.display());
    path
}

/// Folder that outlives the tests: slices and converted models are made once.
pub fn cache() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("e2e");
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Makes `name` in the cache with `make`, unless it is there; several processes may do so at once.
fn cached(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = cache().join(name);
    if !path.is_file() {
        let dir = tempfile::tempdir_in(cache()).unwrap();
        let made = dir.path().join("made.gguf");
        make(&made);
        std::fs::rename(made, &path).unwrap();
    }
    path
}

/// The sample model with F32 weights.
pub fn sample_f32() -> PathBuf {
    let model = sample();
    let size = std::fs::metadata(&model).unwrap().len();
    let digest = Model::open(&model).unwrap().digest().to_owned();
    cached(&format!("{}-{size}-f32.gguf", &digest[..16]), |out| splitmodel_engine::to_f32(&model, out).unwrap())
}

/// A tiny model with random weights: 8 layers.
pub fn tiny(seed: u64) -> PathBuf {
    cached(&format!("tiny-llama-{seed}.gguf"), |out| Tiny { seed, ..Tiny::new(Arch::Llama) }.write(out).unwrap())
}

/// A tiny model of another architecture.
pub fn tiny_of(arch: Arch) -> PathBuf {
    cached(&format!("tiny-{}.gguf", arch.name()), |out| Tiny::new(arch).write(out).unwrap())
}

/// The sample model's vocabulary.
pub fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::load(&sample()).unwrap())
}

/// `count` tokens of a tiny model, other ones for each seed.
pub fn tiny_prompt(seed: u64, count: usize) -> Vec<i32> {
    let mut random = random(seed);
    (0..count).map(|_| 20 + (random() % 200) as i32).collect()
}

/// Numbers below 2³².
pub fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 32
    }
}

/// `count` tokens of plain English for the sample model, other ones for each seed.
pub fn prompt(seed: u64, count: usize) -> Vec<i32> {
    const WHO: [&str; 8] =
        ["The miller", "A young fox", "My aunt", "The captain", "Nobody", "The old clock", "Her brother", "A river"];
    const DOES: [&str; 8] = ["found", "remembers", "painted", "lost", "carries", "hid", "measured", "sold"];
    const WHAT: [&str; 8] = [
        "a letter",
        "seven lamps",
        "the bridge",
        "an answer",
        "two silver spoons",
        "the last train",
        "a garden",
        "the number nine",
    ];
    let mut random = random(seed);
    let mut pick = |words: &[&'static str; 8]| words[random() as usize % 8];
    let mut text = String::new();
    for _ in 0..count {
        text += &format!("{} {} {}. ", pick(&WHO), pick(&DOES), pick(&WHAT));
    }
    let mut tokens = tokenizer().tokenize(&text, false, false).unwrap();
    tokens.truncate(count);
    assert_eq!(tokens.len(), count);
    tokens
}
