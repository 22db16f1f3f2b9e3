//! Parsing of GGUF headers, version 2 and 3.

use std::collections::HashMap;
use std::ops::Range;

use crate::reader::Reader;
use crate::types::TensorType;
use crate::value::{Array, OwnedValue, Value, ValueType};
use crate::{Error, Result, Source};

/// First bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensor data where `general.alignment` says nothing.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted: padding stays small beside the header.
const MAX_ALIGNMENT: u64 = 1 << 16;
/// Longest tensor name, in bytes, that ggml accepts.
pub const MAX_TENSOR_NAME: u64 = 63;

/// Bounds on what a header may hold, checked before anything is allocated.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the whole header.
    pub header_bytes: u64,
    /// Number of metadata keys.
    pub keys: u64,
    /// Bytes of a key.
    pub key_bytes: u64,
    /// Bytes of a string value (and of an element of an array of strings).
    pub string_bytes: u64,
    /// Elements of an array.
    pub array_len: u64,
    /// Number of tensors in a file.
    pub tensors: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_bytes: 256 << 20,
            keys: 1 << 16,
            key_bytes: 1 << 16,
            string_bytes: 64 << 20,
            array_len: 1 << 26,
            tensors: 1 << 18,
        }
    }
}

/// A tensor as its file describes it. Everything has been checked against the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Elements per dimension, fastest first; 1 to 4 of them.
    pub dims: Vec<u64>,
    /// Type.
    pub ty: TensorType,
    /// Offset of the data from the start of the file.
    pub offset: u64,
    /// Bytes of the data.
    pub bytes: u64,
}

#[derive(Debug)]
struct Entry {
    key: String,
    ty: ValueType,
    value: Range<usize>,
}

/// The header of one file.
#[derive(Debug)]
pub struct Header {
    file: String,
    version: u32,
    raw: Vec<u8>,
    entries: Vec<Entry>,
    by_key: HashMap<String, usize>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    alignment: u64,
    data_offset: u64,
    file_len: u64,
}

impl Header {
    /// Reads and checks the header of `source` under the default [`Limits`].
    ///
    /// # Errors
    /// [`Error::Header`] and [`Error::Tensor`] for whatever breaks the format, [`Error::Io`] when it cannot be read.
    pub fn read(source: &dyn Source) -> Result<Self> {
        Self::read_with(source, &Limits::default())
    }

    /// Reads and checks the header of `source`.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub fn read_with(source: &dyn Source, limits: &Limits) -> Result<Self> {
        let mut r = Reader::new(source, limits.header_bytes)?;
        let magic = r.take(4, "the magic")?;
        if r.slice(magic) != MAGIC {
            return Err(r.err(0, "not a GGUF file (the first four bytes are not 'GGUF')"));
        }
        let version = r.u32("the version")?;
        match version {
            2 | 3 => {}
            v if v.swap_bytes() <= 3 => return Err(r.err(4, "a big-endian GGUF file; only little-endian is supported")),
            v => return Err(r.err(4, format!("GGUF version {v}; only 2 and 3 are supported"))),
        }
        let n_tensors = Self::count(&mut r, limits.tensors, "tensors", 24)?;
        let n_keys = Self::count(&mut r, limits.keys, "metadata keys", 13)?;
        let (entries, by_key) = Self::read_entries(&mut r, n_keys, limits)?;
        let mut tensors = Vec::new();
        for index in 0..n_tensors {
            tensors.push(Self::read_tensor(&mut r, index)?);
        }
        let mut header = Self {
            file: r.file().to_owned(),
            version,
            file_len: r.file_len(),
            data_offset: r.pos() as u64,
            raw: r.into_bytes(),
            entries,
            by_key,
            tensors,
            by_name: HashMap::new(),
            alignment: DEFAULT_ALIGNMENT,
        };
        header.place()?;
        Ok(header)
    }

    fn count(r: &mut Reader<'_>, max: u64, what: &str, min_bytes: u64) -> Result<u64> {
        let at = r.pos();
        let n = r.u64(&format!("the number of {what}"))?;
        if n > max {
            return Err(r.err(at, format!("{n} {what}; at most {max} are accepted")));
        }
        r.check_count(n, min_bytes, what)?;
        Ok(n)
    }

    fn read_entries(r: &mut Reader<'_>, n: u64, limits: &Limits) -> Result<(Vec<Entry>, HashMap<String, usize>)> {
        let (mut entries, mut by_key) = (Vec::new(), HashMap::new());
        for index in 0..n {
            let at = r.pos();
            let key = r.string(limits.key_bytes, &format!("metadata key {index}"))?;
            let key = std::str::from_utf8(r.slice(key))
                .map_err(|_| r.err(at, format!("metadata key {index} is not UTF-8")))?
                .to_owned();
            if key.is_empty() {
                return Err(r.err(at, format!("metadata key {index} is empty")));
            }
            if by_key.insert(key.clone(), entries.len()).is_some() {
                return Err(r.err(at, format!("metadata key '{key}' appears twice")));
            }
            let ty = Self::value_type(r, &key)?;
            let start = r.pos();
            Self::skip_value(r, ty, &key, limits)?;
            entries.push(Entry { key, ty, value: start..r.pos() });
        }
        Ok((entries, by_key))
    }

    fn value_type(r: &mut Reader<'_>, key: &str) -> Result<ValueType> {
        let at = r.pos();
        let id = r.u32(&format!("the type of '{key}'"))?;
        ValueType::from_id(id).ok_or_else(|| r.err(at, format!("metadata key '{key}' has unknown type {id}")))
    }

    fn skip_value(r: &mut Reader<'_>, ty: ValueType, key: &str, limits: &Limits) -> Result<()> {
        let what = format!("the value of '{key}'");
        if let Some(n) = ty.fixed_bytes() {
            r.take(n as u64, &what)?;
            return Ok(());
        }
        if ty == ValueType::Str {
            r.string(limits.string_bytes, &what)?;
            return Ok(());
        }
        let at = r.pos();
        let element = Self::value_type(r, key)?;
        let n = r.u64(&what)?;
        if n > limits.array_len {
            return Err(r.err(at, format!("{what} has {n} elements; at most {} are accepted", limits.array_len)));
        }
        match element {
            ValueType::Array => Err(r.err(at, format!("{what} is an array of arrays, which ggml does not load"))),
            ValueType::Str => {
                r.check_count(n, 8, "strings")?;
                for _ in 0..n {
                    r.string(limits.string_bytes, &what)?;
                }
                Ok(())
            }
            fixed => {
                let size = fixed.fixed_bytes().unwrap_or(1) as u64;
                r.take(n.saturating_mul(size), &what).map(drop)
            }
        }
    }

    /// One tensor, its offset still relative to the data.
    fn read_tensor(r: &mut Reader<'_>, index: u64) -> Result<TensorInfo> {
        let at = r.pos();
        let name = r.string(MAX_TENSOR_NAME, &format!("the name of tensor {index}"))?;
        let name = std::str::from_utf8(r.slice(name))
            .map_err(|_| r.err(at, format!("the name of tensor {index} is not UTF-8")))?
            .to_owned();
        let bad = |r: &Reader<'_>, at: usize, what: String| r.err(at, format!("tensor '{name}': {what}"));
        let at = r.pos();
        let n_dims = r.u32("the number of dimensions")?;
        if n_dims > 4 {
            return Err(bad(r, at, format!("{n_dims} dimensions; at most 4 are supported")));
        }
        let mut dims = Vec::with_capacity(4);
        let mut elements: u64 = 1;
        for _ in 0..n_dims {
            let at = r.pos();
            let n = r.u64("a dimension")?;
            if n == 0 {
                return Err(bad(r, at, "a dimension of 0".to_owned()));
            }
            elements = elements
                .checked_mul(n)
                .filter(|&n| i64::try_from(n).is_ok())
                .ok_or_else(|| bad(r, at, "more elements than 2^63".to_owned()))?;
            dims.push(n);
        }
        if dims.is_empty() {
            dims.push(1);
        }
        let at = r.pos();
        let id = r.u32("the type")?;
        let ty = TensorType::from_id(id)
            .ok_or_else(|| bad(r, at, format!("type {id} is unknown or was removed from ggml")))?;
        let row = dims.first().copied().unwrap_or(1);
        let bytes = ty
            .row_bytes(row)
            .ok_or_else(|| {
                bad(r, at, format!("rows of {row} are no multiple of {}'s block of {}", ty.name(), ty.block_elements()))
            })?
            .checked_mul(elements / row)
            .ok_or_else(|| bad(r, at, "more bytes than 2^64".to_owned()))?;
        let offset = r.u64("the data offset")?;
        Ok(TensorInfo { name, dims, ty, offset, bytes })
    }

    /// Makes offsets absolute and checks that the data lie in the file, aligned, without overlap.
    fn place(&mut self) -> Result<()> {
        if let Some(v) = self.get("general.alignment") {
            let ok = self.value_kind("general.alignment") == Some(ValueType::U32);
            self.alignment =
                v.int::<u64>().filter(|a| ok && a.is_power_of_two() && *a <= MAX_ALIGNMENT).ok_or_else(|| {
                    Error::key(&self.file, "general.alignment", "must be a power of two up to 65536, of type u32")
                })?;
        }
        let align = self.alignment;
        let data = self.data_offset.next_multiple_of(align);
        self.data_offset = data;
        let mut spans = Vec::with_capacity(self.tensors.len());
        for (index, t) in self.tensors.iter_mut().enumerate() {
            let bad = |what: String| Error::tensor(&self.file, &t.name, what);
            if t.offset % align != 0 {
                return Err(bad(format!("data offset {} is no multiple of the alignment {align}", t.offset)));
            }
            let start = data.checked_add(t.offset);
            let end = start.and_then(|s| s.checked_add(t.bytes)).filter(|&end| end <= self.file_len);
            let (Some(start), Some(end)) = (start, end) else {
                return Err(bad(format!(
                    "{} bytes at offset {} of the data reach beyond the end of the file ({} bytes): it is truncated \
                     or corrupt",
                    t.bytes, t.offset, self.file_len
                )));
            };
            t.offset = start;
            spans.push((start, end, index));
            if self.by_name.insert(t.name.clone(), index).is_some() {
                return Err(bad("the name appears twice".to_owned()));
            }
        }
        spans.sort_unstable();
        let name = |i: usize| self.tensors.get(i).map_or("", |t| t.name.as_str());
        for pair in spans.windows(2) {
            if let [(_, end, first), (start, _, second)] = *pair
                && start < end
            {
                let what = format!("its data overlap those of '{}' at byte {start}", name(first));
                return Err(Error::tensor(&self.file, name(second), what));
            }
        }
        Ok(())
    }

    /// File or address it was read from.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Version of the format: 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Length of the file in bytes.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Where tensor data begin, from the start of the file.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Alignment of tensor data in bytes.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The header's bytes, without the padding before the data.
    #[must_use]
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The tensors, in the order of the file.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|&i| self.tensors.get(i))
    }

    /// Metadata keys, in the order of the file.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.key.as_str())
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        self.by_key.get(key).and_then(|&i| self.entries.get(i))
    }

    /// Type of a value.
    #[must_use]
    pub fn value_kind(&self, key: &str) -> Option<ValueType> {
        self.entry(key).map(|e| e.ty)
    }

    /// A value.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let entry = self.entry(key)?;
        Value::decode(entry.ty, self.raw.get(entry.value.clone())?)
    }

    /// A value with its own bytes, to be written elsewhere.
    #[must_use]
    pub fn owned(&self, key: &str) -> Option<OwnedValue> {
        let entry = self.entry(key)?;
        Some(OwnedValue { ty: entry.ty, raw: self.raw.get(entry.value.clone())?.to_vec() })
    }

    fn wrong<T>(&self, key: &str, wanted: &str) -> Result<T> {
        Err(Error::key(&self.file, key, format!("is not {wanted}")))
    }

    /// An integer that fits `u32`; `None` where the key is absent.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is something else.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.get(key)
            .map_or(Ok(None), |v| v.int().map_or_else(|| self.wrong(key, "an unsigned integer"), |v| Ok(Some(v))))
    }

    /// An integer that must be there.
    ///
    /// # Errors
    /// [`Error::Key`] when it is missing or something else.
    pub fn required_u32(&self, key: &str) -> Result<u32> {
        self.u32(key)?.ok_or_else(|| Error::key(&self.file, key, "is missing"))
    }

    /// A float; `None` where the key is absent.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is something else.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        match self.get(key) {
            None => Ok(None),
            #[allow(clippy::cast_possible_truncation)] // an f32 was widened, or the caller wants one
            Some(Value::Float(v)) => Ok(Some(v as f32)),
            Some(_) => self.wrong(key, "a float"),
        }
    }

    /// A boolean; `None` where the key is absent.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(v)),
            Some(_) => self.wrong(key, "a boolean"),
        }
    }

    /// A string; `None` where the key is absent.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is something else or not UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.get(key)
            .map_or(Ok(None), |v| v.text().map_or_else(|| self.wrong(key, "a string in UTF-8"), |v| Ok(Some(v))))
    }

    /// An array; `None` where the key is absent.
    ///
    /// # Errors
    /// [`Error::Key`] when the value is something else.
    pub fn array(&self, key: &str) -> Result<Option<Array<'_>>> {
        self.get(key).map_or(Ok(None), |v| v.array().map_or_else(|| self.wrong(key, "an array"), |v| Ok(Some(v))))
    }

    /// A value per layer: `n` of an array, or one for all; `None` where the key is absent.
    ///
    /// # Errors
    /// [`Error::Key`] when the array has not `n` elements, or the values do not fit `u32`.
    pub fn per_layer_u32(&self, key: &str, n: usize) -> Result<Option<Vec<u32>>> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) => array,
            Some(v) => return v.int().map_or_else(|| self.wrong(key, "an unsigned integer"), |v| Ok(Some(vec![v; n]))),
        };
        if array.len() != n {
            return self.wrong(key, &format!("an array of {n} values, one for each layer: it has {}", array.len()));
        }
        let values: Option<Vec<u32>> = array.iter().map(Value::int).collect();
        values
            .filter(|v| v.len() == n)
            .map_or_else(|| self.wrong(key, "an array of unsigned integers"), |v| Ok(Some(v)))
    }
}
