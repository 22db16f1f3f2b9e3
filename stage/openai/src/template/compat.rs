//! What chat templates expect of their engine beyond Jinja itself: the helpers of Hugging Face's `apply_chat_template`.

use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Prefix of errors that a template raises itself; what follows is for the client.
pub(crate) const RAISED: &str = "raised by the template: ";

/// An environment with the settings and helpers that chat templates are written for.
pub(crate) fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_function("strftime_now", |format: String| {
        jiff::fmt::strtime::format(format.as_str(), &Zoned::now())
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
    });
    env.add_filter("tojson", tojson);
    Ok(env)
}

/// `json.dumps(value, ensure_ascii=False)` of Python: no HTML escapes, a space after `,` and `:`.
fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _ascii: Option<bool> = options.get("ensure_ascii")?;
    let _sort: Option<bool> = options.get("sort_keys")?;
    let _separators: Option<Value> = options.get("separators")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(n) if n > 16 => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent is above 16")),
        Some(n) => {
            let indent = " ".repeat(n);
            let format = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, format))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    written.map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")))?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")))
}

/// Python's separators.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Takes Hugging Face's `{% generation %}` marks out; they only serve training.
pub(crate) fn without_generation_marks(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |e| e + 2);
        let inner = tag[2..end].trim_end_matches("%}").trim_matches(['-', '+']).trim();
        if !matches!(inner, "generation" | "endgeneration") {
            out.push_str(&tag[..end]);
        } else if tag[2..].starts_with('-') || tag[..end].ends_with("-%}") {
            // Keeps the tag's trimming of white space on either side.
            let open = if tag[2..].starts_with('-') { "{#-" } else { "{#" };
            let close = if tag[..end].ends_with("-%}") { "-#}" } else { "#}" };
            out.push_str(open);
            out.push_str(close);
        } else {
            out.push_str("{##}");
        }
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}
