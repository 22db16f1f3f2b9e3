//! What a JSON schema may have. The compiler takes more than linear time in some of it, as much stack as parts lie within
//! each other, and for ever where counts are large; all of this is seen before it begins.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Properties of one object.
const PROPERTIES: usize = 500;
/// Properties of all objects together.
const ALL_PROPERTIES: usize = 1000;
/// Objects and booleans, which is what subschemas are.
const SUBSCHEMAS: usize = 3000;
/// JSON values of the schema.
const VALUES: usize = 10_000;
/// Bytes of all `pattern`s, and of the names in `patternProperties`.
const PATTERN_BYTES: usize = 32 << 10;
/// `pattern`s and `format`s; each is an automaton of its own.
const REGEXES: usize = 200;
/// Names in `patternProperties`; each is compared with each.
const PATTERN_PROPERTIES: usize = 32;
/// `minLength`, `maxItems` and their like.
const COUNT: f64 = 1_000_000.0;
/// Digits of all `multipleOf` read as whole numbers, added up, and their least common multiple.
const MULTIPLES: u64 = 10_000;

/// Combinations of alternatives that one schema demands at once (`allOf` of `anyOf`s): each is compiled.
const COMBINATIONS: usize = 64;
/// Patterns that one text must match at once: their automata multiply.
const PATTERNS_AT_ONCE: usize = 2;

const COUNTS: [&str; 8] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"];

/// Says what of `schema` is too much, if anything.
pub(super) fn check(schema: &Map<String, Value>) -> Result<(), String> {
    let mut seen = Seen::default();
    // Not recursive: who calls may have a small stack.
    let mut open: Vec<&Value> = Vec::new();
    seen.object(schema, &mut open)?;
    while let Some(value) = open.pop() {
        seen.values += 1;
        if seen.values > VALUES {
            return Err(format!("it has more than {VALUES} JSON values; make it smaller"));
        }
        seen.subschemas += usize::from(value.is_object() || value.is_boolean());
        if seen.subschemas > SUBSCHEMAS {
            return Err(format!("it has more than {SUBSCHEMAS} subschemas; make it smaller"));
        }
        match value {
            Value::Object(map) => seen.object(map, &mut open)?,
            Value::Array(list) => open.extend(list),
            _ => {}
        }
    }
    seen.multiples()
}

#[derive(Default)]
struct Seen {
    values: usize,
    subschemas: usize,
    properties: usize,
    pattern_properties: usize,
    pattern_bytes: usize,
    regexes: usize,
    /// Each `multipleOf` as a whole number times a power of a tenth.
    steps: BTreeSet<(u64, u32)>,
    step_sum: u64,
}

impl Seen {
    fn object<'a>(&mut self, map: &'a Map<String, Value>, open: &mut Vec<&'a Value>) -> Result<(), String> {
        let properties = map.get("properties").and_then(Value::as_object);
        let required = map.get("required").and_then(Value::as_array).into_iter().flatten();
        let unnamed =
            required.filter(|name| !name.as_str().is_some_and(|n| properties.is_some_and(|p| p.contains_key(n))));
        let n = properties.map_or(0, Map::len) + unnamed.count();
        self.properties += n;
        if n > PROPERTIES {
            return Err(format!("an object has {n} properties; at most {PROPERTIES} are accepted"));
        }
        if self.properties > ALL_PROPERTIES {
            return Err(format!("its objects have more than {ALL_PROPERTIES} properties together; make it smaller"));
        }
        if let Some(Value::Object(properties)) = map.get("patternProperties") {
            self.pattern_properties += properties.len();
            self.pattern_bytes += properties.keys().map(String::len).sum::<usize>();
            if self.pattern_properties > PATTERN_PROPERTIES {
                return Err(format!("`patternProperties` has more than {PATTERN_PROPERTIES} names"));
            }
        }
        if let Some(Value::String(pattern)) = map.get("pattern") {
            self.pattern_bytes += pattern.len();
        }
        self.regexes += ["pattern", "format"].iter().filter(|f| map.get(**f).is_some_and(Value::is_string)).count();
        if self.regexes > REGEXES {
            return Err(format!("it has more than {REGEXES} `pattern`s and `format`s together; leave some out"));
        }
        if self.pattern_bytes > PATTERN_BYTES {
            return Err(format!("its patterns have more than {PATTERN_BYTES} bytes together; make them shorter"));
        }
        combinations(map)?;
        for field in COUNTS {
            if let Some(n) = map.get(field).and_then(Value::as_f64).filter(|n| *n > COUNT) {
                return Err(format!("`{field}` is {n}; at most {COUNT} is accepted, or leave it out"));
            }
        }
        if let Some(step) = map.get("multipleOf").and_then(Value::as_f64) {
            let (digits, places) = decimal(step.abs())
                .ok_or_else(|| format!("`multipleOf` is {step}; a number of few digits is accepted"))?;
            self.step_sum = self.step_sum.saturating_add(digits);
            self.steps.insert((digits, places));
        }
        open.extend(map.values());
        Ok(())
    }

    /// Steps may meet in one number (`allOf`), whose step is then their least common multiple.
    fn multiples(&self) -> Result<(), String> {
        let places = self.steps.iter().map(|s| s.1).max().unwrap_or(0);
        let scaled = |(digits, own): &(u64, u32)| digits.checked_mul(10u64.checked_pow(places - own)?);
        let mut common = Some(1u64);
        for step in self.steps.iter().filter(|s| s.0 > 0) {
            common = common.zip(scaled(step)).and_then(|(a, b)| (a / gcd(a, b)).checked_mul(b));
        }
        let common = common.map(|c| reduced(c, places).0);
        if self.step_sum > MULTIPLES || common.is_none_or(|c| c > MULTIPLES) {
            return Err(format!(
                "`multipleOf` asks for too much: the digits of all of them, read as whole numbers, may add up to \
                 {MULTIPLES}, and so may their least common multiple"
            ));
        }
        Ok(())
    }
}

/// `value` as a whole number and the count of its decimal places; `None` if it has too many digits.
/// Checks what an object and the members of its `allOf` demand at once.
fn combinations(map: &Map<String, Value>) -> Result<(), String> {
    let members = map.get("allOf").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_object);
    let (mut combinations, mut patterns) = (1_usize, 0);
    for schema in members.chain([map]) {
        for field in ["anyOf", "oneOf"] {
            let alternatives = schema.get(field).and_then(Value::as_array).map_or(1, |a| a.len().max(1));
            // A single choice is no combination, however many it offers.
            combinations = combinations.saturating_mul(alternatives);
        }
        patterns += usize::from(schema.contains_key("pattern"));
    }
    let choices = map.get("anyOf").or_else(|| map.get("oneOf")).and_then(Value::as_array).map_or(0, Vec::len);
    if combinations > COMBINATIONS && combinations != choices {
        return Err(format!("it combines {combinations} alternatives at once; at most {COMBINATIONS} are accepted"));
    }
    if patterns > PATTERNS_AT_ONCE {
        return Err(format!("{patterns} `pattern`s hold at once; at most {PATTERNS_AT_ONCE} are accepted"));
    }
    Ok(())
}

fn decimal(value: f64) -> Option<(u64, u32)> {
    let (mut value, mut places) = (value, 0);
    while value.fract() != 0.0 {
        value *= 10.0;
        places += 1;
        if places > 15 {
            return None;
        }
    }
    (value <= f64::from(u32::MAX)).then(|| reduced(value as u64, places))
}

/// Without zeros at the end of the decimal places.
fn reduced(mut digits: u64, mut places: u32) -> (u64, u32) {
    while places > 0 && digits.is_multiple_of(10) {
        digits /= 10;
        places -= 1;
    }
    (digits, places)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(schema: Value) -> Option<String> {
        check(schema.as_object().unwrap()).err()
    }

    fn properties(n: usize) -> Value {
        (0..n).map(|i| (format!("p{i}"), json!(true))).collect::<Map<_, _>>().into()
    }

    #[test]
    fn what_people_write_is_within() {
        assert_eq!(said(json!({})), None);
        assert_eq!(said(json!({"type": "object", "properties": properties(PROPERTIES)})), None);
        assert_eq!(said(json!({"maxLength": 1_000_000, "multipleOf": 0.01})), None);
        let steps = [0.01, 0.5, 5.0, 10.0, 60.0, 1000.0];
        assert_eq!(said(json!({"anyOf": steps.map(|s| json!({"multipleOf": s}))})), None);
        assert_eq!(said(json!({"multipleOf": 0, "properties": {"multipleOf": {"multipleOf": 3}}})), None);
    }

    #[test]
    fn each_bound_is_named() {
        let table = [
            (json!({"properties": properties(PROPERTIES + 1)}), "501 properties"),
            (
                json!({"items": [{"properties": properties(PROPERTIES)}, {"properties": properties(PROPERTIES)},
                {"properties": properties(1)}]}),
                "more than 1000 properties",
            ),
            (json!({"required": vec!["p"; PROPERTIES + 1]}), "501 properties"),
            (json!({"enum": vec![0; VALUES]}), "more than 10000 JSON values"),
            (json!({"prefixItems": vec![true; SUBSCHEMAS + 1]}), "more than 3000 subschemas"),
            (json!({"pattern": "a".repeat(PATTERN_BYTES + 1)}), "patterns"),
            (json!({"items": vec![json!({"pattern": "a", "format": "uuid"}); REGEXES / 2 + 1]}), "`pattern`s and"),
            (json!({"patternProperties": properties(PATTERN_PROPERTIES + 1)}), "`patternProperties`"),
            (json!({"allOf": vec![json!({"anyOf": vec![true; 6]}); 4]}), "combines 1296 alternatives"),
            (json!({"allOf": vec![json!({"pattern": "^.*a.{8}b.*$"}); 3]}), "3 `pattern`s"),
            (json!({"not": {"maxItems": 1e9}}), "`maxItems` is 1000000000"),
            (json!({"multipleOf": 1_000_003}), "`multipleOf`"),
            (json!({"multipleOf": 1e-300}), "`multipleOf`"),
            (json!({"multipleOf": 1e300}), "`multipleOf`"),
            (json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), "least common multiple"),
            (json!({"allOf": [{"multipleOf": 4_294_967_291u64}, {"multipleOf": 4_294_967_279u64}]}), "`multipleOf`"),
        ];
        for (schema, word) in table {
            let said = said(schema).unwrap();
            assert!(said.contains(word), "{word}: {said}");
        }
    }

    #[test]
    fn depth_takes_no_stack() {
        let mut schema = json!({"type": "string"});
        for _ in 0..SUBSCHEMAS - 2 {
            schema = Value::Object(Map::from_iter([("items".to_owned(), schema)]));
        }
        let checked = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            let result = check(schema.as_object().unwrap());
            // Dropping a tree this deep would take the stack that checking it does not.
            std::mem::forget(schema);
            result
        });
        assert_eq!(checked.unwrap().join().unwrap(), Ok(()));
    }
}
