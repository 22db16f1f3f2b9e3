//! Keeps text of users apart from the template's own.

use indexmap::IndexMap;
use minijinja::Value;

use crate::error::ApiError;
use crate::template::specials::Specials;

/// The noncharacters of the Arabic block: Unicode keeps them free for such use inside programs.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Breaks control tokens in users' texts with a mark, a character that none of them contains. The mark goes from the
/// rendered prompt after the template's own control tokens were found.
#[derive(Debug)]
pub(crate) struct Guard<'a> {
    specials: &'a Specials,
    mark: char,
    end: char,
}

impl<'a> Guard<'a> {
    /// A guard whose marks occur in none of `texts` (the request's raw body and the template).
    pub(crate) fn new(specials: &'a Specials, texts: &[&str]) -> Result<Self, ApiError> {
        let mut used = [false; 32];
        for c in texts.iter().flat_map(|t| t.chars()).filter(|c| MARKS.contains(c)) {
            used[c as usize - *MARKS.start() as usize] = true;
        }
        let mut free = MARKS.zip(used).filter(|(_, used)| !used).map(|(c, _)| c);
        match (free.next(), free.next()) {
            (Some(mark), Some(end)) => Ok(Self { specials, mark, end }),
            _ => Err(ApiError::invalid(
                "messages",
                "`messages` hold all the noncharacters U+FDD0 to U+FDEF; leave them out.",
            )),
        }
    }

    /// The mark to take out again.
    pub(crate) fn mark(&self) -> char {
        self.mark
    }

    /// Another such character, put behind a message that is to be continued.
    pub(crate) fn end(&self) -> char {
        self.end
    }

    /// A text with its control tokens broken.
    pub(crate) fn text(&self, text: &str) -> String {
        let breaks = self.specials.breaks(text);
        let mut out = String::with_capacity(text.len() + breaks.len() * self.mark.len_utf8());
        let mut from = 0;
        for at in breaks {
            out.push_str(&text[from..at]);
            out.push(self.mark);
            from = at;
        }
        out.push_str(&text[from..]);
        out
    }

    /// A JSON value for the template, all its strings (keys too) with their control tokens broken.
    pub(crate) fn json(&self, value: &serde_json::Value) -> Value {
        match value {
            serde_json::Value::Null => Value::from(()),
            serde_json::Value::Bool(b) => Value::from(*b),
            serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(n), _) => Value::from(n),
                (_, Some(n)) => Value::from(n),
                _ => Value::from(n.as_f64().unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(s) => Value::from(self.text(s)),
            serde_json::Value::Array(list) => list.iter().map(|v| self.json(v)).collect(),
            serde_json::Value::Object(map) => map
                .iter()
                .map(|(k, v)| (Value::from(self.text(k)), self.json(v)))
                .collect::<IndexMap<Value, Value>>()
                .into(),
        }
    }
}
