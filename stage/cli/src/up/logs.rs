//! What a failed stage said.
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes of a log that are looked at.
const WINDOW: u64 = 64 << 10;
/// Lines that are shown.
const SHOWN: usize = 8;
/// Characters of a line that are shown.
const LINE: usize = 400;
/// Words of a line that says why a process ended.
const FATAL: [&str; 6] = ["error", "fatal", "panicked", "assert", "abort", "what():"];

/// The first lines that say why the run that began at byte `from` of the log at `path` ended; the last lines if none does.
#[must_use]
pub fn fatal_lines(path: &Path, from: u64) -> String {
    let text = match read_tail(path, from) {
        Ok(text) => text,
        Err(e) => return format!("(its log {} cannot be read: {e})", path.display()),
    };
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    let first = lines.iter().position(|line| {
        let line = line.to_ascii_lowercase();
        FATAL.iter().any(|word| line.contains(word))
    });
    let start = first.unwrap_or_else(|| lines.len().saturating_sub(SHOWN));
    let shown: Vec<String> = lines.iter().skip(start).take(SHOWN).map(|l| format!("  {}", clean(l))).collect();
    if shown.is_empty() { "  (it wrote nothing)".into() } else { shown.join("\n") }
}

/// No control characters: a log must not steer the terminal.
fn clean(line: &str) -> String {
    line.chars().filter(|c| !c.is_control() || *c == '\t').take(LINE).collect()
}

fn read_tail(path: &Path, from: u64) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let end = file.metadata()?.len();
    file.seek(SeekFrom::Start(from.max(end.saturating_sub(WINDOW))))?;
    let mut bytes = Vec::new();
    file.take(WINDOW).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str, from: u64) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l");
        std::fs::write(&path, text).unwrap();
        fatal_lines(&path, from)
    }

    #[test]
    fn the_first_fatal_line_comes_first() {
        assert_eq!(log("loading\nERROR no memory\nbye\n", 0), "  ERROR no memory\n  bye");
        assert_eq!(log("error of the run before\nloading\nGGML_ASSERT(x)\n", 24), "  GGML_ASSERT(x)");
    }

    #[test]
    fn without_one_the_last_lines_are_shown() {
        let many: String = (0..20).map(|n| format!("line {n}\n\n")).collect();
        let shown = log(&many, 0);
        assert!(shown.starts_with("  line 12\n") && shown.ends_with("line 19"), "{shown}");
        assert_eq!(log("", 0), "  (it wrote nothing)");
    }

    #[test]
    fn logs_are_bounded_and_cannot_steer_the_terminal() {
        let shown = log(&format!("{}\nfatal \u{1b}[31mred\u{7}{}", "x".repeat(1 << 20), "y".repeat(10_000)), 0);
        assert!(shown.starts_with("  fatal [31mredyyy"), "{shown}");
        assert!(shown.len() < 500);
        assert!(fatal_lines(Path::new("/nonexistent/log"), 0).contains("cannot be read"));
    }
}
