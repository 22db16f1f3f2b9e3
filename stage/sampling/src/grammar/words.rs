//! The compiler's messages in words for those who wrote the grammar.

/// Longest part of a message that is passed on.
const LONGEST: usize = 200;

const TOO_COMPLEX: &str = "it is too complex to be enforced; make it smaller or simpler";
const NO_TEXT: &str =
    "no text can match it; look for bounds that exclude each other and for `$ref`s that only lead to each other";
const OTHER: &str = "it has a part that cannot be enforced; make it simpler";

/// Messages that say enough as they are.
const CLEAR: [&str; 9] = [
    "Invalid type: ",
    "Expected ",
    "Value ",
    "Unknown format: ",
    "Reference segment ",
    "Definition not found: ",
    "circular references ",
    "patternProperty regexes ",
    "min/maxProperties only supported ",
];

/// Signs of a compiler that gave up.
const LIMITS: [&str; 9] = [
    "too big",
    "too large",
    "too many states",
    "fuel",
    "Current row has",
    "TooComplex",
    "too complex",
    "Unable to determine",
    "stack level exceeded",
];

/// What to tell of `reason`, an error of the compiler or of the first mask.
pub(super) fn clean(reason: &str) -> String {
    let line = reason.lines().next().unwrap_or_default().trim();
    if let Some(what) = line.strip_prefix("Unsatisfiable schema: ") {
        return match what.split_once(": (") {
            // A regular expression in the compiler's own notation.
            Some((what, _)) => format!("no value can match it: {}", short(what)),
            None => format!("no value can match it: {}", short(what)),
        };
    }
    if line.starts_with("oneOf constraints") {
        return "`oneOf` is not supported; use `anyOf`".to_owned();
    }
    if let Some(keys) = line.strip_prefix("Unimplemented keys: ") {
        return format!("these keywords are not supported: {}; leave them out", short(keys.trim_matches(['[', ']'])));
    }
    if line.starts_with("Only absolute $ref") {
        return "`$ref` must lead to a place in the schema itself, such as `#/$defs/NAME`".to_owned();
    }
    if line.starts_with("Failed to generate regex") {
        return "the bounds of a number cannot be enforced; use smaller numbers of fewer digits".to_owned();
    }
    if line.contains("'multipleOf'") {
        return "`multipleOf` must be a number of few digits that is not negative".to_owned();
    }
    if line.starts_with("regex parse error") {
        let why = reason.lines().rev().find_map(|l| l.trim().strip_prefix("error: "));
        return format!("a regular expression cannot be read: {}", short(why.unwrap_or("it is not well formed")));
    }
    if ["NoExtension", "no text"].iter().any(|sign| line.starts_with(sign)) {
        return NO_TEXT.to_owned();
    }
    if LIMITS.iter().any(|sign| line.contains(sign)) {
        return TOO_COMPLEX.to_owned();
    }
    if CLEAR.iter().any(|begin| line.starts_with(begin)) || line.ends_with(" must be an object") {
        return short(line);
    }
    OTHER.to_owned()
}

/// One short line without control characters.
fn short(text: &str) -> String {
    let mut out: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect();
    if out.len() < text.len() {
        out.push('…');
    }
    out
}
