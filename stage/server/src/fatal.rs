//! The last words of the process: what ended it, for whoever looks after the process (Kubernetes reads the termination log).

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes of a termination message that Kubernetes keeps.
pub const MAX_MESSAGE: usize = 4096;

/// Exit code where another start may go better: the source cannot be reached, memory is short, a port is taken.
pub const TRANSIENT: u8 = 1;
/// Exit code where it cannot, as long as neither configuration nor model is changed.
pub const PERMANENT: u8 = 3;

struct Words {
    path: PathBuf,
    text: String,
}

static WORDS: Mutex<Option<Words>> = Mutex::new(None);

/// From now on the first fatal lines are kept in `path` too: of errors that end the process, of panics, and of llama.cpp where
/// it aborts.
pub fn keep_in(path: &Path) {
    *WORDS.lock().unwrap_or_else(PoisonError::into_inner) = Some(Words { path: path.to_owned(), text: String::new() });
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        note(&panic.to_string());
    }));
    splitmodel_engine::on_abort(note);
}

/// Keeps a fatal line behind those before it, as long as there is room.
pub fn note(line: &str) {
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(words) = words.as_mut() else { return };
    if !words.text.is_empty() {
        words.text.push('\n');
    }
    words.text.push_str(line.trim_end());
    words.text.truncate(shortened(&words.text).len());
    if let Err(error) = write(&words.path, &words.text) {
        complain(&format!("--termination-log: {}: {error}", words.path.display()));
    }
}

/// The process ends in order: what a thread complained of before did not matter.
pub fn forget() {
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(words) = words.take()
        && !words.text.is_empty()
    {
        let _ = write(&words.path, ""); // nobody reads it after success
    }
}

/// As much of `text` as a termination message holds.
#[must_use]
pub fn shortened(text: &str) -> &str {
    let mut end = text.len().min(MAX_MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Replaces what is in the file at `path`, which may be a mount of its own.
///
/// # Errors
/// When it cannot be written.
pub fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(path)?;
    file.write_all(shortened(text).as_bytes())
}

/// Writes a fatal error to standard error, where whoever started the process looks.
pub fn complain(message: &str) {
    let _ = writeln!(std::io::stderr(), "error: {message}"); // nowhere else to say it
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lines_are_kept_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        note("before there is a file");
        keep_in(&path);
        assert!(!path.exists());
        let _ = std::thread::spawn(|| panic!("first")).join();
        note("second\n");
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].contains("panicked at") && lines[1] == "first" && lines[2] == "second", "{text}");
        note(&"ä".repeat(MAX_MESSAGE));
        note("too late");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!((MAX_MESSAGE - 1..=MAX_MESSAGE).contains(&text.len()) && text.ends_with('ä'), "{} bytes", text.len());
        forget();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        note("after the end");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    }
}
