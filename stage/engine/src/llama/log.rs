//! llama.cpp's log: into `tracing`, and into a record of the calling thread while it loads something.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::sync::OnceLock;

use llama_cpp_sys_2 as sys;

/// Lines a record keeps; a load writes a few hundred.
const MAX_LINES: usize = 4096;
/// Error lines quoted as the reason of a failure.
const REASON_LINES: usize = 3;

pub(crate) struct Line {
    error: bool,
    text: String,
}

thread_local! {
    static RECORD: RefCell<Option<Vec<Line>>> = const { RefCell::new(None) };
}

/// What llama.cpp wrote during a call.
#[derive(Default)]
pub(crate) struct Record(Vec<Line>);

impl Record {
    /// Runs `f` and keeps what llama.cpp logs on this thread meanwhile.
    pub(crate) fn of<T>(f: impl FnOnce() -> T) -> (T, Self) {
        RECORD.with(|r| r.replace(Some(Vec::new())));
        let value = f();
        let lines = RECORD.with(|r| r.replace(None));
        (value, Self(lines.unwrap_or_default()))
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|l| l.text.as_str())
    }

    /// llama.cpp's last error lines.
    pub(crate) fn reason(&self) -> String {
        let errors: Vec<_> = self.0.iter().filter(|l| l.error).map(|l| l.text.trim()).collect();
        if errors.is_empty() {
            return "llama.cpp gave no reason; its log at level debug may tell".to_owned();
        }
        errors[errors.len().saturating_sub(REASON_LINES)..].join("; ")
    }
}

/// Installs the callbacks; idempotent.
pub(crate) fn install() {
    // SAFETY: the callbacks are static functions, need no user data, and never unwind.
    unsafe {
        sys::llama_log_set(Some(on_log), std::ptr::null_mut());
        sys::ggml_set_abort_callback(Some(aborting));
    }
}

/// Who is told when llama.cpp ends the process.
static ON_ABORT: OnceLock<fn(&str)> = OnceLock::new();

/// Has `tell` called with llama.cpp's reason when it is about to end the process; once for each process.
pub fn on_abort(tell: fn(&str)) {
    let _ = ON_ABORT.set(tell); // the first one stays
}

unsafe extern "C" fn aborting(text: *const c_char) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes a NUL-terminated string that lives for the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // In ggml's place, which is silent where somebody listens. Nobody is left to hear that it failed.
    let _ = writeln!(std::io::stderr(), "llama.cpp ends the process: {}", text.trim_end());
    if let Some(tell) = ON_ABORT.get() {
        tell(&format!("llama.cpp ends the process: {}", text.trim_end()));
    }
}

unsafe extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a NUL-terminated string that lives for the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let line = text.trim_end();
    if line.is_empty() {
        return;
    }
    keep(level, line);
    // llama.cpp's "info" is a page for every model: debug here.
    match level {
        sys::GGML_LOG_LEVEL_ERROR => tracing::error!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_WARN => tracing::warn!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_INFO => tracing::debug!(target: "llama.cpp", "{line}"),
        _ => tracing::trace!(target: "llama.cpp", "{line}"),
    }
}

fn keep(level: sys::ggml_log_level, line: &str) {
    // A thread that is going away has no record.
    let _ = RECORD.try_with(|record| {
        let Ok(mut record) = record.try_borrow_mut() else { return };
        let Some(lines) = record.as_mut() else { return };
        if level == sys::GGML_LOG_LEVEL_CONT {
            if let Some(last) = lines.last_mut() {
                last.text.push_str(line);
            }
        } else if lines.len() < MAX_LINES && level != sys::GGML_LOG_LEVEL_DEBUG {
            lines.push(Line { error: level == sys::GGML_LOG_LEVEL_ERROR, text: line.to_owned() });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_hears_why_llama_cpp_aborts() {
        static HEARD: std::sync::Mutex<String> = std::sync::Mutex::new(String::new());
        on_abort(|text| HEARD.lock().unwrap().push_str(text));
        // SAFETY: the text is NUL-terminated and static; null is what ggml never passes, and is not read.
        unsafe {
            aborting(std::ptr::null());
            aborting(c"ggml.c:1: GGML_ASSERT(x) failed\n".as_ptr());
        }
        assert_eq!(*HEARD.lock().unwrap(), "llama.cpp ends the process: ggml.c:1: GGML_ASSERT(x) failed");
    }

    #[test]
    fn the_last_error_lines_are_the_reason() {
        let ((), record) = Record::of(|| {
            keep(sys::GGML_LOG_LEVEL_INFO, "loading");
            for i in 0..5 {
                keep(sys::GGML_LOG_LEVEL_ERROR, &format!("error {i}"));
            }
            keep(sys::GGML_LOG_LEVEL_CONT, " and more");
        });
        assert_eq!(record.reason(), "error 2; error 3; error 4 and more");
        assert_eq!(record.lines().count(), 6);
        keep(sys::GGML_LOG_LEVEL_ERROR, "outside");
        let ((), record) = Record::of(|| ());
        assert!(record.reason().contains("no reason"));
    }
}
