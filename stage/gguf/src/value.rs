//! Metadata values as they lie in a header.

/// Type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ValueType {
    /// `u8`.
    U8 = 0,
    /// `i8`.
    I8 = 1,
    /// `u16`.
    U16 = 2,
    /// `i16`.
    I16 = 3,
    /// `u32`.
    U32 = 4,
    /// `i32`.
    I32 = 5,
    /// `f32`.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// Length and bytes.
    Str = 8,
    /// Element type, length and elements; never nested, as in ggml.
    Array = 9,
    /// `u64`.
    U64 = 10,
    /// `i64`.
    I64 = 11,
    /// `f64`.
    F64 = 12,
}

impl ValueType {
    /// The type with number `id`.
    #[must_use]
    pub const fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::Str,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a value of fixed size; `None` for strings and arrays.
    #[must_use]
    pub const fn fixed_bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Str | Self::Array => None,
        }
    }
}

/// A value, borrowed from the header.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Any integer.
    Int(i128),
    /// `f32` or `f64`.
    Float(f64),
    /// Boolean.
    Bool(bool),
    /// String; the format does not promise UTF-8.
    Str(&'a [u8]),
    /// Array.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Decodes the bytes of one value of type `ty`; `None` when they do not fit it.
    #[must_use]
    pub fn decode(ty: ValueType, raw: &'a [u8]) -> Option<Self> {
        Some(match ty {
            ValueType::U8 => Self::Int(u8::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::I8 => Self::Int(i8::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::U16 => Self::Int(u16::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::I16 => Self::Int(i16::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::U32 => Self::Int(u32::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::I32 => Self::Int(i32::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::U64 => Self::Int(u64::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::I64 => Self::Int(i64::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::F32 => Self::Float(f32::from_le_bytes(raw.try_into().ok()?).into()),
            ValueType::F64 => Self::Float(f64::from_le_bytes(raw.try_into().ok()?)),
            ValueType::Bool => Self::Bool(u8::from_le_bytes(raw.try_into().ok()?) != 0),
            ValueType::Str => {
                let (len, text) = raw.split_first_chunk::<8>()?;
                (u64::from_le_bytes(*len) == text.len() as u64).then_some(Self::Str(text))?
            }
            ValueType::Array => {
                let (ty, rest) = raw.split_first_chunk::<4>()?;
                let (len, data) = rest.split_first_chunk::<8>()?;
                let ty = ValueType::from_id(u32::from_le_bytes(*ty))?;
                Self::Array(Array { ty, len: usize::try_from(u64::from_le_bytes(*len)).ok()?, data })
            }
        })
    }

    /// The integer (or boolean) as `T`, if it fits.
    #[must_use]
    pub fn int<T: TryFrom<i128>>(self) -> Option<T> {
        match self {
            Self::Int(v) => T::try_from(v).ok(),
            Self::Bool(v) => T::try_from(v.into()).ok(),
            _ => None,
        }
    }

    /// The text, if it is a string in UTF-8.
    #[must_use]
    pub fn text(self) -> Option<&'a str> {
        match self {
            Self::Str(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The array.
    #[must_use]
    pub fn array(self) -> Option<Array<'a>> {
        match self {
            Self::Array(a) => Some(a),
            _ => None,
        }
    }
}

/// An array of values of one type that is itself no array.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    ty: ValueType,
    len: usize,
    data: &'a [u8],
}

impl<'a> Array<'a> {
    /// Type of the elements.
    #[must_use]
    pub fn element_type(&self) -> ValueType {
        self.ty
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the elements, as in the file.
    #[must_use]
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The elements; ends early where the bytes do.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (ty, mut rest, mut left) = (self.ty, self.data, self.len);
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let size = match ty.fixed_bytes() {
                Some(n) => n,
                None => {
                    let len = u64::from_le_bytes(*rest.first_chunk::<8>()?);
                    usize::try_from(len).ok()?.checked_add(8)?
                }
            };
            let (raw, tail) = rest.split_at_checked(size)?;
            rest = tail;
            Value::decode(ty, raw)
        })
    }
}

/// A value with its own bytes, to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedValue {
    pub(crate) ty: ValueType,
    pub(crate) raw: Vec<u8>,
}

macro_rules! scalar {
    ($($(#[$doc:meta])* $name:ident($t:ty) = $ty:ident;)*) => {
        impl OwnedValue {
            $($(#[$doc])* #[must_use] pub fn $name(v: $t) -> Self {
                Self { ty: ValueType::$ty, raw: v.to_le_bytes().to_vec() }
            })*
        }
    };
}

scalar! {
    /// A `u8`.
    u8(u8) = U8;
    /// A `i8`.
    i8(i8) = I8;
    /// A `u16`.
    u16(u16) = U16;
    /// A `i16`.
    i16(i16) = I16;
    /// A `u32`.
    u32(u32) = U32;
    /// A `i32`.
    i32(i32) = I32;
    /// A `u64`.
    u64(u64) = U64;
    /// A `i64`.
    i64(i64) = I64;
    /// A `f32`.
    f32(f32) = F32;
    /// A `f64`.
    f64(f64) = F64;
}

impl OwnedValue {
    /// A boolean.
    #[must_use]
    pub fn bool(v: bool) -> Self {
        Self { ty: ValueType::Bool, raw: vec![v.into()] }
    }

    /// A string of any bytes.
    #[must_use]
    pub fn str(v: impl AsRef<[u8]>) -> Self {
        let v = v.as_ref();
        let mut raw = (v.len() as u64).to_le_bytes().to_vec();
        raw.extend_from_slice(v);
        Self { ty: ValueType::Str, raw }
    }

    fn array_of(ty: ValueType, len: usize, data: impl IntoIterator<Item = u8>) -> Self {
        let mut raw = (ty as u32).to_le_bytes().to_vec();
        raw.extend((len as u64).to_le_bytes());
        raw.extend(data);
        Self { ty: ValueType::Array, raw }
    }

    /// An array of `u32`.
    #[must_use]
    pub fn u32s(v: &[u32]) -> Self {
        Self::array_of(ValueType::U32, v.len(), v.iter().flat_map(|x| x.to_le_bytes()))
    }

    /// An array of `i32`.
    #[must_use]
    pub fn i32s(v: &[i32]) -> Self {
        Self::array_of(ValueType::I32, v.len(), v.iter().flat_map(|x| x.to_le_bytes()))
    }

    /// An array of `f32`.
    #[must_use]
    pub fn f32s(v: &[f32]) -> Self {
        Self::array_of(ValueType::F32, v.len(), v.iter().flat_map(|x| x.to_le_bytes()))
    }

    /// An array of booleans.
    #[must_use]
    pub fn bools(v: &[bool]) -> Self {
        Self::array_of(ValueType::Bool, v.len(), v.iter().map(|&x| x.into()))
    }

    /// An array of strings.
    #[must_use]
    pub fn strs<S: AsRef<[u8]>>(v: &[S]) -> Self {
        let data = v.iter().flat_map(|s| {
            let s = s.as_ref();
            (s.len() as u64).to_le_bytes().into_iter().chain(s.iter().copied())
        });
        Self::array_of(ValueType::Str, v.len(), data)
    }

    /// Elements `first..end` of an array of fixed-size elements; `None` when it is none or shorter.
    #[must_use]
    pub fn cut(array: Array<'_>, first: usize, end: usize) -> Option<Self> {
        let size = array.ty.fixed_bytes()?;
        let data = array.data.get(first.checked_mul(size)?..end.checked_mul(size)?)?;
        Some(Self::array_of(array.ty, end - first, data.iter().copied()))
    }

    /// The value, decoded.
    #[must_use]
    pub fn view(&self) -> Option<Value<'_>> {
        Value::decode(self.ty, &self.raw)
    }
}
