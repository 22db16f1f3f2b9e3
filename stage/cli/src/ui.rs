//! What the user sees: results on standard output, progress on standard error.
use std::fmt::Write as _;
use std::io::Write as _;

use crate::error::CliError;

/// Writes a line to standard output, at once.
///
/// # Errors
/// [`CliError::Output`].
pub fn line(text: &str) -> Result<(), CliError> {
    self::text(&format!("{text}\n"))
}

/// Writes text without a line end to standard output, at once.
///
/// # Errors
/// [`CliError::Output`].
pub fn text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Output)
}

/// Writes a line to standard output for whoever still reads it: what goes on without a reader must not end for want of one.
pub fn offer(text: &str) {
    if let Err(error) = line(text) {
        note(&format!("warning: {error}"));
    }
}

/// Writes a line to standard error.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Bytes for people, such as `1.5 GiB`.
#[must_use]
pub fn bytes(n: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, size) in UNITS {
        if n >= size {
            let tenths = u128::from(n) * 10 / u128::from(size);
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{n} B")
}

/// Text of others without what a terminal would obey.
#[must_use]
pub fn plain(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// Lines up `rows` under `head`, two blanks apart, without trailing blanks.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let mut push = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (cell, width) in cells.zip(&widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    };
    push(&mut head.iter().copied());
    for row in rows {
        push(&mut row.iter().map(String::as_str));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_down_to_tenths() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 30) - 1), "1023.9 MiB");
        assert_eq!(bytes(u64::MAX), "16777215.9 TiB");
    }

    #[test]
    fn what_others_say_commands_no_terminal() {
        assert_eq!(plain("a\n\u{1b}[2Jb\u{9b}c"), "a  [2Jb c");
    }

    #[test]
    fn tables_line_up() {
        let rows = vec![vec!["0".into(), "[0, 12)".into()], vec!["10".into(), String::new()]];
        assert_eq!(table(&["STAGE", "LAYERS"], &rows), "STAGE  LAYERS\n0      [0, 12)\n10\n");
    }
}
